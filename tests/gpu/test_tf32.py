"""TF32's rounding and the proof of a split: what is right is not refused, and what is wrong still is."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_memkit import MemoryBudget
from lightning_memkit.micro_batching.sizes.sizing import BudgetError
from tests.gpu.card import sized
from tests.gpu.runs import distance, fit
from tests.gpu.test_out_of_memory import BUDGET, InBackward
from tests.plugins.noise import NOISE
from tests.plugins.toys import weights

pytestmark = [
    pytest.mark.gpu,
    *NOISE,
    pytest.mark.filterwarnings("ignore:Please use the new API settings to control TF32"),
]


@pytest.fixture(params=[False, True], ids=["float32", "tf32"], autouse=True)
def tf32(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Of products and of convolutions; the latter is torch's default."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if request.param else "highest")
    torch.backends.cudnn.allow_tf32 = request.param
    yield request.param
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


class Convolved(LightningModule):
    """A mean over samples behind a function that shows nothing of it: only a comparison of gradients proves it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        channels = sized(64, 8)
        self.body = nn.Sequential(
            nn.Conv2d(3, channels, 3), nn.GELU(), nn.Conv2d(channels, channels, 3), nn.GELU(), nn.Flatten()
        )
        self.head = nn.Sequential(nn.LazyLinear(256), nn.GELU(), nn.Linear(256, 32))
        self.head(self.body(torch.zeros(1, 3, 16, 16)))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Any = InBackward.apply(self.loss(self.head(self.body(batch["image"])), batch["kind"]))
        return loss

    def loss(self, found: Tensor, kinds: Tensor) -> Tensor:
        return F.cross_entropy(found, kinds)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Contrastive(Convolved):
    """Its rows act on each other: no split is right."""

    def loss(self, found: Tensor, kinds: Tensor) -> Tensor:
        return F.cross_entropy(found @ found.T, torch.arange(len(found), device=found.device))


def images(count: int = 4) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    data: Any = [
        {"image": torch.randn(3, 16, 16, generator=generator), "kind": torch.tensor(number % 32)}
        for number in range(8 * count)
    ]
    return DataLoader(data, batch_size=8)


@pytest.mark.usefixtures("device")
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_split_that_is_right_is_taken() -> None:
    plain = fit(module=Convolved(), data=images())
    budget = MemoryBudget(BUDGET, micro_batch_size=2)
    ours = fit(budget, module=Convolved(), data=images())
    start = weights(Convolved())
    assert budget.history[-1].micro_batch_size == 2
    assert distance([ours - start], [plain - start]) <= 0.01


@pytest.mark.usefixtures("device")
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_one_that_is_wrong_is_refused() -> None:
    with pytest.raises(BudgetError):
        fit(MemoryBudget(BUDGET, micro_batch_size=2, within="step"), module=Contrastive(), data=images())
