"""A batch as large as any that training may meet, found among some of the data set's samples."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from time import perf_counter
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_debug
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_memkit.micro_batching import batch_size, split_batch
from lightning_memkit.utilities.tensors import tensors_of

_SCANNED_ITEMS, _SCAN_SECONDS = 256, 2.0
_SCANS: ContextVar[dict[int, tuple[DataLoader, list[Any]]] | None] = ContextVar("scans", default=None)


@contextmanager
def scanned_once() -> Iterator[None]:
    """Within the context, a loader's samples are read only once; up to 511 are kept until it ends."""
    token = _SCANS.set({})
    try:
        yield
    finally:
        _SCANS.reset(token)


def worst_batch(trainer: Trainer, batch: Any, rows: int) -> Any:
    """A batch of `rows` samples as large as any that training may meet.

    A datamodule or LightningModule with a `worst_batch(rows)` method provides it (`PackedDataModule` does).
    For a map-style data set, the largest of 256 to 511 evenly spaced items are collated (of all items if there are
    fewer, and of those that are read within 2 seconds). Otherwise the current batch is used.
    """
    owners: tuple[Any, ...] = (getattr(trainer, "datamodule", None), trainer.lightning_module)
    for owner in owners:
        if callable(getattr(owner, "worst_batch", None)):
            return _before_transfer(trainer, owner.worst_batch(rows))
    if isinstance(batch, Tensor) or not hasattr(batch, "split"):
        try:
            largest = _largest_collated(trainer, rows)
        except Exception as error:  # a user's data set may fail in any way on arbitrary items
            rank_zero_debug(f"MemoryBudget takes the batch at hand for the worst: {error!r}")
            largest = None
        if largest is not None and _elements(largest) >= _elements(batch) * rows / max(1, batch_size(batch)):
            return largest
    total = batch_size(batch)
    return batch if rows >= total else split_batch(batch, [rows, total - rows])[0]


def _largest_collated(trainer: Trainer, rows: int) -> Any:
    loader: Any = trainer.train_dataloader
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        return None
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        return None
    items = _largest_first(loader, dataset)
    if not items:
        return None
    # Copies, since a collate function may modify its items.
    chosen = [copy(items[index % len(items)]) for index in range(rows)]
    batch = _before_transfer(trainer, loader.collate_fn(chosen))
    total = batch_size(batch)  # a collate function may make several rows from an item
    return batch if total <= rows else split_batch(batch, [rows, total - rows])[0]


def _largest_first(loader: DataLoader, dataset: Any) -> list[Any]:
    scans = _SCANS.get()
    if scans is not None and id(loader) in scans:
        return scans[id(loader)][1]
    started, items = perf_counter(), []
    for index in range(0, len(dataset), max(1, len(dataset) // _SCANNED_ITEMS)):
        items.append(dataset[index])
        if perf_counter() - started > _SCAN_SECONDS:
            break
    items.sort(key=_elements, reverse=True)
    if scans is not None:
        scans[id(loader)] = (loader, items)
    return items


def _before_transfer(trainer: Trainer, batch: Any) -> Any:
    """What Lightning does to a batch between the loader and the transfer to the device."""
    batch = trainer.precision_plugin.convert_input(batch)
    return trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)


def _elements(item: Any) -> int:
    return sum(tensor.numel() for tensor in tensors_of(item))
