"""A step that moves weights by itself is not moved by the contamination probe."""

from typing import Any

import torch
from torch import Tensor, nn

from lightning_memkit.attention.contamination import probe_contamination
from lightning_memkit.data.batching.batch import PackedBatch
from tests.attention.test_contamination import Model
from tests.attention.test_transformers import packed


class Taught(Model):
    """Moves a teacher within the step, and keeps a sum of what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(16, 128)
        self.seen = [torch.zeros(())]

    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.head.weight, 0.1)
            self.teacher.bias.data.mul_(0.9)
            self.seen[0].add_(1)
        return super().training_step(batch, batch_idx)


def test_the_probe_moves_no_teacher() -> None:
    model, batch = Taught(), packed()
    before: dict[str, Any] = {name: value.clone() for name, value in model.state_dict().items()}
    assert probe_contamination(model, batch)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert model.seen[0] == 0
