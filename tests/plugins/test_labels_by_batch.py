"""Batches of one run whose labels are class indices, and others whose labels are shares of classes or lists."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_memkit import MemoryBudget
from tests.plugins.toys import trainer, weights

CLASSES, ROWS = 4, 8


class Classifier(LightningModule):
    """Cross-entropy as torch computes it, or by the module's own functions, whose graph shows no divisor."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()
        self.own = own

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        logits, labels = self.net(batch["x"]), torch.as_tensor(batch["y"])
        if not self.own:
            return F.cross_entropy(logits, labels)
        if labels.ndim == 1:
            kept = labels != -100
            losses = F.cross_entropy(logits, labels, reduction="none")
            return Opaque.apply(losses, float(kept.sum()))
        return Opaque.apply(-(labels * logits.log_softmax(1)).sum(1), float(len(labels)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Opaque(torch.autograd.Function):
    """A mean of which autograd's graph tells nothing."""

    @staticmethod
    def forward(ctx: Any, losses: Tensor, count: float) -> Tensor:
        ctx.rows, ctx.count = len(losses), count
        return losses.sum() / count

    @staticmethod
    def backward(ctx: Any, *factors: Tensor) -> tuple[Tensor, None]:
        return factors[0].expand(ctx.rows) / ctx.count, None


def batches(kinds: str, ignored: bool) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for kind in kinds:
        x = torch.randn(ROWS, 6, generator=generator, dtype=torch.float64)
        y = torch.randint(0, CLASSES, (ROWS,), generator=generator)
        if kind == "i" and ignored:
            y[torch.rand(ROWS, generator=generator) < 0.4] = -100
        shares = F.one_hot(y.clamp(min=0), CLASSES).double() * 0.8 + 0.2 / CLASSES
        made.append({"x": x, "y": {"i": y, "l": y.tolist(), "s": shares}[kind]})
    return made


def fit(kinds: str, size: Any, *, own: bool, ignored: bool) -> Tensor:
    torch.manual_seed(0)
    module = Classifier(own)
    callbacks = [] if size is None else [MemoryBudget("1GiB", micro_batch_size=size, within="step")]
    data: Any = batches(kinds, ignored)
    trainer(*callbacks, max_epochs=1, max_steps=-1).fit(module, DataLoader(data, batch_size=None))
    return weights(module)


@pytest.mark.sampled(8)
@pytest.mark.filterwarnings("ignore:.*lists")
@pytest.mark.parametrize("own", [False, True], ids=["observed", "compared"])
@pytest.mark.parametrize("size", [1, 3, "auto"])
@pytest.mark.parametrize("kinds", ["iiisiisi", "siiisiii", "iiiliili", "isisisis"])
@pytest.mark.long
def test_each_batch_is_weighed_by_what_its_own_labels_tell(kinds: str, size: Any, own: bool) -> None:
    """MixUp that is drawn in some batches: training ended with an error about a weigh_by that nobody had written."""
    for ignored in (False, True) if "l" not in kinds else (False,):
        plain = fit(kinds, None, own=own, ignored=ignored)
        torch.testing.assert_close(fit(kinds, size, own=own, ignored=ignored), plain, rtol=1e-12, atol=1e-13)
