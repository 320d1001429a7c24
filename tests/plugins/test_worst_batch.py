"""The samples that a worst batch is made of: read once for all trials, whatever a collate function does to them."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_memkit import MemoryBudget
from lightning_memkit.plugins.seams._worst_batch import scanned_once, worst_batch
from tests.plugins.toys import tagged_rows, trained


class Counting(Dataset[dict[str, Tensor]]):
    """Rows as long as their index says; counts who reads them."""

    def __init__(self, count: int = 40) -> None:
        self.rows = tagged_rows(count, length=count)
        self.reads = Counter[int]()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.reads[index] += 1
        return dict(self.rows[index])


class Noting(MemoryBudget):
    """The reads while step 1 is prepared."""

    def prepare(self, step: Any) -> None:
        dataset: Any = step.trainer.train_dataloader.dataset
        first, before = self.sizing is None, Counter(dataset.reads)
        super().prepare(step)
        if first:
            self.reads = dataset.reads - before


def test_each_sample_is_read_once_while_a_size_is_chosen() -> None:
    data = Counting()
    budget = Noting("600KiB")
    trained(budget, data=DataLoader(data, batch_size=8), max_steps=2)
    assert budget.sizing is not None
    assert len(budget.sizing.trials) > 2
    assert budget.reads == Counter(range(40))


def stand_in(loader: DataLoader) -> Any:
    """What of a trainer is asked for."""
    module = SimpleNamespace(_on_before_batch_transfer=lambda batch, dataloader_idx: batch)
    precision = SimpleNamespace(convert_input=lambda batch: batch)
    return SimpleNamespace(train_dataloader=loader, lightning_module=module, precision_plugin=precision)


def test_another_loader_is_read_anew_and_so_is_the_same_one_later() -> None:
    data = [Counting(6), Counting(6)]
    loaders = [DataLoader(own, batch_size=2) for own in data]
    batch = next(iter(loaders[0]))
    with scanned_once():
        for loader in (*loaders, *loaders):
            worst_batch(stand_in(loader), batch, 2)
    assert data[1].reads == Counter(range(6))
    worst_batch(stand_in(loaders[1]), batch, 2)
    worst_batch(stand_in(loaders[1]), batch, 1)
    assert set(data[1].reads.values()) == {3}


def test_a_collate_function_may_take_samples_apart() -> None:
    def taking(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {name: torch.stack([item.pop(name) for item in items]) for name in ("x", "labels")}

    loader = DataLoader(Counting(6), batch_size=2, collate_fn=taking)
    batch = {"x": torch.zeros(2, 1), "labels": torch.zeros(2, 1)}
    with scanned_once():
        found = [worst_batch(stand_in(loader), batch, rows) for rows in (8, 3)]
    assert [tuple(one["x"].shape) for one in found] == [(8, 6), (3, 6)]


def test_the_largest_samples_are_taken() -> None:
    rows = [{"x": torch.zeros(1 + index % 5)} for index in range(10)]

    def padded(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {"x": torch.nn.utils.rnn.pad_sequence([item["x"] for item in items], batch_first=True)}

    loader: Any = DataLoader(rows, batch_size=2, collate_fn=padded)  # pyright: ignore[reportArgumentType]
    with scanned_once():
        found = worst_batch(stand_in(loader), next(iter(loader)), 3)
    assert tuple(found["x"].shape) == (3, 5)
