"""Steps that don't run on one row (batch normalization), under MemoryBudget."""

import traceback
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memkit import MemoryBudget
from lightning_memkit.micro_batching.sizes.sizing import BudgetError
from lightning_memkit.micro_batching.splitting import even_sizes
from tests.plugins.toys import trained, weights

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*normalize with statistics of the batch"),
]


class Normalized(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return (self.net(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Demanding(Normalized):
    """Rows don't act on each other, but one alone is refused."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if len(batch[0]) < 2:
            raise ValueError("one row")
        return super().training_step(batch, batch_idx)


def loader(rows: int = 33, count: int = 66, dtype: torch.dtype = torch.float32) -> DataLoader:
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(1)).to(dtype)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=rows)


@pytest.mark.parametrize(
    ("total", "largest", "sizes"), [(33, 3, 11), (5, 2, 2), (3, 2, 1), (1, 2, 1), (4, 1, 2), (7, 7, 1)]
)
def test_no_part_holds_less_than_the_fewest(total: int, largest: int, sizes: int) -> None:
    parts = even_sizes(total, largest, 2)
    assert (len(parts), sum(parts)) == (sizes, total)
    assert min(parts) >= min(2, total)
    assert max(parts) - min(parts) <= 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", ["auto", 2, 3, 5])
@pytest.mark.parametrize("rows", [33, 5])
def test_a_step_that_refuses_one_row_trains_as_the_whole_batch(size: Any, rows: int) -> None:
    data: dict[str, Any] = {
        "data": loader(rows, dtype=torch.float64),
        "max_steps": 4,
        "module": Demanding,
        "dtype": torch.float64,
    }
    plain, _ = trained(**data)
    split, _ = trained(MemoryBudget("1GiB", micro_batch_size=size), **data)
    torch.testing.assert_close(weights(split), weights(plain), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", ["auto", 33])
def test_batch_normalization_over_features_runs_whole_where_it_fits(size: Any) -> None:
    plain, _ = trained(data=loader(), max_steps=4, module=Normalized)
    whole, _ = trained(
        MemoryBudget("1GiB", micro_batch_size=size), data=loader(), max_steps=4, module=Normalized
    )
    for name, value in plain.state_dict().items():
        assert torch.equal(whole.state_dict()[name], value), name


@pytest.mark.parametrize("size", ["auto", 1, 3])
def test_a_users_own_error_of_the_whole_batch_comes_out_as_it_is(size: Any) -> None:
    """With a size of the user's it was said to be one of micro-batches."""

    class Broken(Normalized):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            return [super().training_step(batch, batch_idx)][1]

    with pytest.raises(IndexError) as caught:
        trained(MemoryBudget("1GiB", micro_batch_size=size), data=loader(), module=Broken)
    assert any(frame.name == "training_step" for frame in caught.traceback)


def test_an_error_of_micro_batches_alone_shows_where_it_was_raised() -> None:
    class NeedsMany(Demanding):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            loss = (self.net(batch[0]) - batch[1]).square().mean()
            return [loss][0 if len(batch[0]) > 5 else 1]

    with pytest.raises(
        BudgetError, match=r"fails on a micro-batch \(IndexError: list index out of range\)"
    ) as caught:
        trained(MemoryBudget("1GiB", micro_batch_size=3, within="step"), data=loader(), module=NeedsMany)
    cause = caught.value.__cause__
    assert isinstance(cause, IndexError)
    frames = [frame for frame, _ in traceback.walk_tb(cause.__traceback__)]
    assert any(frame.f_code.co_name == "training_step" for frame in frames)
    assert not any(isinstance(value, Tensor) for frame in frames for value in frame.f_locals.values())
