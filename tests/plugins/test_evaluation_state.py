from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import CatMetric, SumMetric

from lightning_memkit.micro_batching.evaluation import state


class Gathering(nn.Module):
    """Keeps what people keep between batches."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.total, self.batches, self.name = 0.0, 0, "a name"
        self.outputs: list[Tensor] = []
        self.sums = {"loss": torch.zeros(()), "rows": [0, 0]}
        self.metric, self.values = SumMetric(), CatMetric()
        self.register_buffer("running", torch.zeros(3))
        self.running: Tensor

    def step(self, x: Tensor) -> None:
        self.total += float(x.sum())
        self.batches += 1
        self.outputs.append(x)
        self.sums["loss"] += x.mean()
        rows: Any = self.sums["rows"]
        rows[0] += len(x)
        self.metric.update(x)
        self.values.update(x)
        self.running += 1


@pytest.mark.parametrize("inference", [False, True])
def test_a_failed_step_leaves_nothing(inference: bool) -> None:
    module = Gathering()
    with torch.inference_mode(inference):
        module.step(torch.ones(4))
        expected = {key: repr(value) for key, value in vars(module).items() if not key.startswith("_")}
        rollback = state.EvaluationRollback(module)
        module.step(torch.full((4,), 7.0))
        assert rollback.restore() == frozenset()
    assert {key: repr(value) for key, value in vars(module).items() if not key.startswith("_")} == expected
    assert module.metric.compute() == 4.0
    assert module.values.compute().tolist() == [1.0] * 4
    assert module.running.tolist() == [1.0] * 3


def test_all_that_a_step_changes_is_found_by_name() -> None:
    module = Gathering()
    rollback = state.EvaluationRollback(module)
    module.step(torch.ones(4))
    assert {str(change) for change in rollback.left_behind()} == {
        "total (attribute)",
        "batches (attribute)",
        "outputs (container)",
        "sums['loss'] (container)",
        "sums['rows'] (container)",
        "metric (metric)",
        "values (metric)",
        "running (buffer)",
    }


def test_what_was_gathered_is_not_copied() -> None:
    module = Gathering()
    module.outputs = [torch.zeros(state._SMALL + 1) for _ in range(3)]
    rollback = state.EvaluationRollback(module)
    held = {id(one.tensor) for one in rollback._tensors if one.copy is not None}
    assert id(module.sums["loss"]) in held
    assert not held & {id(output) for output in module.outputs}
    module.outputs.append(torch.ones(1))
    rollback.restore()
    assert len(module.outputs) == 3
