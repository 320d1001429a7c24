"""The jobs of loader workers: the rows of each step's batch, or of the parts in which it is sent."""

from collections.abc import Iterator

from lightning_memkit.data.batching.batch import PackedBatch
from lightning_memkit.data.batching.batch_plan import Epoch
from lightning_memkit.data.batching.packed_rows import PackedRows, RowsOfLength
from lightning_memkit.data.batching.resharding import Batch, CutRows


class EpochBatches:
    """Steps of an epoch, each with the row numbers of a rank's batch."""

    def __init__(self, epoch: Epoch, rank: int, steps: range) -> None:
        self._epoch, self._rank, self._steps = epoch, rank, steps

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[tuple[int, Batch]]:
        for step in self._steps:
            yield step, self._epoch.batch(step, self._rank)


class JobParts:
    """The batches in parts of at most this many tokens, each padded to the length of the whole batch."""

    def __init__(self, batches: EpochBatches, rows: PackedRows, tokens: int) -> None:
        self._batches, self._rows, self._tokens = batches, rows, tokens

    def __len__(self) -> int:
        return sum(len(self.of(rows)) for _, rows in self._batches)

    def __iter__(self) -> Iterator[tuple[int, RowsOfLength | CutRows]]:
        for step, rows in self._batches:
            yield from ((step, part) for part in self.of(rows))

    def of(self, rows: Batch) -> list[RowsOfLength | CutRows]:
        """The parts of a batch."""
        if isinstance(rows, CutRows):
            return [rows]
        length = self._rows.length_of(rows)
        each = max(1, self._tokens // length)
        return [RowsOfLength(rows=rows[cut : cut + each], length=length) for cut in range(0, len(rows), each)]


def build(rows: PackedRows, job: tuple[int, Batch | RowsOfLength]) -> PackedBatch:
    """Build the batch, or the part of one, that a job describes."""
    return rows[job[1]]
