"""Plans and predictions from a loader or a data module: those of its first batch, and the data is left as it was."""

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, RandomSampler

from lightning_memkit import Budget, plan, predict_memory
from lightning_memkit.plugins.planning._first_batch import batch_of, first_batch
from tests.plugins.toys import TokenTagger, tagged_rows

ROWS = tagged_rows(32)


class Data(LightningDataModule):
    def __init__(self, loaders: object = None) -> None:
        super().__init__()
        self.loaders, self.calls = loaders, list[str]()

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append(stage)

    def train_dataloader(self):
        return self.loaders or DataLoader(ROWS, batch_size=8)  # pyright: ignore[reportArgumentType]


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(value, second[name]) for name, value in first.items()
    )


def test_a_plan_and_a_prediction_are_those_of_the_first_batch() -> None:
    loader = DataLoader(ROWS, batch_size=8)  # pyright: ignore[reportArgumentType]
    batch = next(iter(loader))
    budget = Budget("1GiB", device="t4", goal="exact")  # whose times are computed, not measured
    expected = str(plan(TokenTagger(), batch, budget).best)
    data = Data()
    assert str(plan(TokenTagger(), loader, budget).best) == expected
    assert str(plan(TokenTagger(), data, budget).best) == expected
    assert data.calls == ["prepare_data", "fit"]
    assert predict_memory(TokenTagger(), loader).peak_bytes == predict_memory(TokenTagger(), batch).peak_bytes


@pytest.mark.parametrize("own", [False, True], ids=["global", "own generator"])
def test_the_order_of_a_loader_is_as_if_nobody_had_looked(own: bool) -> None:
    def loader() -> DataLoader:
        torch.manual_seed(3)
        generator = torch.Generator().manual_seed(4) if own else None
        sampler = RandomSampler(ROWS, generator=generator)  # pyright: ignore[reportArgumentType]
        return DataLoader(ROWS, batch_size=8, sampler=sampler, generator=generator)  # pyright: ignore

    expected = list(loader())
    looked_at = loader()
    assert same(batch_of(looked_at), expected[0])
    assert all(map(same, looked_at, expected))


def test_several_loaders_give_what_the_trainer_trains_on() -> None:
    loaders = {name: DataLoader(ROWS, batch_size=rows) for name, rows in (("a", 4), ("b", 2))}  # pyright: ignore
    batch = first_batch(Data(loaders))
    assert {name: len(one["labels"]) for name, one in batch.items()} == {"a": 4, "b": 2}


def test_a_batch_is_taken_as_it_is() -> None:
    batch = [torch.ones(2), {"x": torch.ones(2)}]
    assert batch_of(batch) is batch


def test_data_without_a_batch_is_refused_by_name() -> None:
    empty = DataLoader([], batch_size=2)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="training data of DataLoader gives no batch"):
        predict_memory(TokenTagger(), empty)
