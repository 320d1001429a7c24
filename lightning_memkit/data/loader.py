"""Batches of packed rows that resume where they stopped: the state is five integers, the same on every rank.

The order of an epoch follows from (seed, epoch, number of rows) alone, so every rank works it out for itself
and none talks to another. Nothing draws from torch's global random numbers: a resumed run draws what the
uninterrupted run would have drawn.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from lightning_memkit.data.batch import PackedBatch
from lightning_memkit.data.collate import collate, rounded_length
from lightning_memkit.data.packing import Packing
from lightning_memkit.data.store import TokenStore


@dataclass(frozen=True, kw_only=True)
class PackedRows(Dataset[PackedBatch]):
    """Rows that can be asked for by their numbers: ``rows[[3, 17]]`` is a batch of two.

    Attributes:
        store: The documents' tokens.
        packing: What stands in each row.
        pad_id: The token that fills a row's end.
        multiple_of: Rounds a batch's length up, but never beyond the context.
    """

    store: TokenStore
    packing: Packing
    pad_id: int = 0
    multiple_of: int = 1

    def __len__(self) -> int:
        return self.packing.rows

    def __getitem__(self, rows: Sequence[int] | NDArray[np.integer]) -> PackedBatch:
        return collate(self.store, self.packing, rows, pad_id=self.pad_id, multiple_of=self.multiple_of)

    @property
    def longest_batch(self) -> int:
        """Tokens in a row of the longest batch there can be."""
        longest = int(self.packing.row_tokens.max()) if len(self) else self.packing.context
        return rounded_length(longest, self.packing.context, self.multiple_of)


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """How a loader deals its rows.

    Attributes:
        batch_size: Rows a batch, on each rank.
        shuffle: Deals the rows in a new order every epoch.
        seed: Of the orders.
        drop_last: Leaves out the rows of the last, smaller batch (counted as ``dropped_rows``).
        num_workers: Processes that build batches ahead; 0 builds them in this one.
        pin_memory: Batches in page-locked memory, for faster copies to an accelerator; needs one.
    """

    batch_size: int
    shuffle: bool = True
    seed: int = 0
    drop_last: bool = False
    num_workers: int = 0
    pin_memory: bool = False

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size} is below 1; a batch has at least one row.")
        if self.num_workers < 0:
            raise ValueError(f"num_workers={self.num_workers} is below 0; 0 builds batches in this process.")


class PackedLoader:
    """A sized, stateful iterable of ``PackedBatch``; an ``iter`` is an epoch, or the rest of a resumed one.

    Each rank gets other rows and the same number of batches. The rows left for the last step are dealt too,
    in smaller batches. If they are fewer than the ranks, the step before gives up as many as are needed.

    Args:
        rows: What to deal.
        options: How.
        rank: Of this process.
        world_size: Number of processes that share the rows.

    Raises:
        ValueError: there are fewer rows than ranks, or than a whole step with ``drop_last``.
    """

    def __init__(
        self, rows: PackedRows, options: LoaderOptions, *, rank: int = 0, world_size: int = 1
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} is outside 0 to {world_size - 1} (world_size={world_size}).")
        self.rows = rows
        self.options = options
        self.rank = rank
        self.world_size = world_size
        self._steps = _deal(len(rows), options.batch_size, world_size, options.drop_last)
        if not self._steps:
            raise ValueError(
                f"{len(rows)} rows are too few for batch_size={options.batch_size} on {world_size} rank(s) "
                f"with drop_last={options.drop_last}; add documents, or lower the batch size or the context."
            )
        self._epoch = 0
        self._batches_done = 0
        self._has_begun = False  # a batch of this epoch was drawn since it began or was resumed
        self._iteration = 0
        # Lightning announces epochs to `loader.batch_sampler.sampler`.
        self.batch_sampler = SimpleNamespace(sampler=self)

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def dropped_rows(self) -> int:
        """Rows of every epoch that no rank gets."""
        return len(self.rows) - self._steps[-1][1]

    def set_epoch(self, epoch: int) -> None:
        """Begins this epoch at its first batch, unless it is the present one."""
        if epoch != self._epoch:
            self._epoch, self._batches_done, self._has_begun = epoch, 0, False

    def state_dict(self) -> dict[str, int]:
        """Where the loader stands: the same on every rank."""
        return {**self._identity(), "epoch": self._epoch, "batches_done": self._batches_done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where the state was taken.

        Raises:
            ValueError: rows, batch size, number of ranks or seed differ from then.
        """
        now = self._identity()
        differing = [
            f"{name}: {state.get(name)} then, {now[name]} now" for name in now if state.get(name) != now[name]
        ]
        if differing:
            raise ValueError(
                f"The loader's state is of other data ({'; '.join(differing)}), so its position means "
                "nothing here; resume with the same data options and ranks, or load the weights alone."
            )
        self._epoch, self._batches_done, self._has_begun = state["epoch"], state["batches_done"], False

    def __iter__(self) -> Iterator[PackedBatch]:
        # Lightning may ask for an iterator twice before it draws from one: that is still the same epoch.
        if self._has_begun:
            self.set_epoch(self._epoch + 1)
        self._iteration += 1
        return self._batches(self._iteration)

    def _batches(self, iteration: int) -> Iterator[PackedBatch]:
        # This runs at the first `next`: the epoch may be set between `iter` and then.
        if self._batches_done >= len(self):
            self.set_epoch(self._epoch + 1)
        self._has_begun = True
        done = self._batches_done
        for batch in self._built(_EpochBatches(self, self._epoch, done)):
            done += 1
            if iteration == self._iteration:  # an iterator that a newer one replaced has no say
                self._batches_done = done
            yield batch

    def _built(self, batches: "_EpochBatches") -> Iterator[PackedBatch]:
        options = self.options
        if options.num_workers == 0:
            for rows in batches:
                batch = self.rows[rows]
                yield batch.pin_memory() if options.pin_memory else batch
            return
        loader: DataLoader[PackedBatch] = DataLoader(
            self.rows,
            batch_size=None,
            sampler=batches,
            num_workers=options.num_workers,
            collate_fn=_unchanged,  # pyright: ignore[reportArgumentType] # one batch, not a list of samples
            pin_memory=options.pin_memory,
            generator=torch.Generator().manual_seed(options.seed),  # else it draws from the global one
        )
        yield from loader

    def _identity(self) -> dict[str, int]:
        return {
            "seed": self.options.seed,
            "rows": len(self.rows),
            "rows_per_step": self.options.batch_size * self.world_size,
        }


class _EpochBatches:
    """The row numbers of this rank's batches, from ``first`` to the epoch's end."""

    def __init__(self, loader: PackedLoader, epoch: int, first: int) -> None:
        self._loader, self._first = loader, first
        if loader.options.shuffle:
            self._order = np.random.default_rng((loader.options.seed, epoch)).permutation(len(loader.rows))
        else:
            self._order = np.arange(len(loader.rows))

    def __len__(self) -> int:
        return len(self._loader) - self._first

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        rank, world_size = self._loader.rank, self._loader.world_size
        for begin, end in self._loader._steps[self._first :]:
            mine = (begin + (end - begin) * part // world_size for part in (rank, rank + 1))
            yield self._order[slice(*mine)]


def _deal(rows: int, batch_size: int, world_size: int, drop_last: bool) -> list[tuple[int, int]]:
    """The rows of each step over all ranks, as ranges: at least one for every rank."""
    whole, rest = divmod(rows, batch_size * world_size)
    ends = [(step + 1) * batch_size * world_size for step in range(whole)]
    if rest and not drop_last:
        if rest >= world_size:
            ends.append(rows)
        elif whole and batch_size > 1:
            ends[-1] = rows - world_size
            ends.append(rows)
        # One row a rank and step: the rest can't be shared out, and is dropped.
    return list(zip([0, *ends], ends, strict=False))


def _unchanged(batch: PackedBatch) -> PackedBatch:
    return batch
