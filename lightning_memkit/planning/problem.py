"""The search problem, and its configurations: whether one fits, and how long its step takes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from lightning_memkit.memory.anatomy import CATEGORIES
from lightning_memkit.memory.units import format_bytes
from lightning_memkit.planning.budget import Goal
from lightning_memkit.planning.choices import ACTIVATIONS, DDP, STATES, STATES_AND_ACTIVATIONS, Family
from lightning_memkit.planning.times import (
    HOST_BYTES_PER_SECOND,
    Times,
    moved_bytes,
    part_seconds,
    reduced,
    step_seconds,
)
from lightning_memkit.prediction.result import Prediction

Rejection = Literal["too large", "not needed", "impossible"]

_NAMED = 4  # categories in a reason
_ROOMY = 4  # times what weights and gradients take


class UnavailableError(ValueError):
    """A choice does not apply to this module, which has no blocks to checkpoint or no head to chunk."""

    def __init__(self, column: str, reason: str) -> None:
        super().__init__(column, reason)
        self.column, self.reason = column, reason

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True)
class ChunkLimits:
    """How much of a batch a module in chunks takes at a time.

    Attributes:
        rows: at most so many, in modules whose rows are independent; None for all.
        tokens: at most so many of each row, in modules that take tokens one by one; None for all.
    """

    rows: int | None = None
    tokens: int | None = None

    def __str__(self) -> str:
        sizes = {"row": self.rows, "token": self.tokens}
        return "".join(
            f", modules in chunks of {size} {name}{'s' * (size > 1)}"
            for name, size in sizes.items()
            if size is not None
        )


@dataclass(frozen=True, kw_only=True)
class Row:
    """A configuration of a plan, or the reason why it was rejected.

    Attributes:
        family: its choices.
        micro_batch_size: rows of a micro-batch; 0 if nothing was predicted.
        chunks: of modules that run in chunks; no limits where none does.
        parts: micro-batches in a loader batch.
        taken_bytes: bytes that it takes on the device; 0 if nothing was predicted.
        seconds: predicted time of an optimizer step; approximate, but comparable between rows.
        rejected: why it can't be used; empty if it fits.
        rejected_as: the kind of that reason; None if it fits.
        gain: the largest fraction of its time that fewer, larger micro-batches could save.
        exact: whether this micro-batch was predicted; else it is extrapolated from smaller ones.
        prediction: of this micro-batch, or of the largest one predicted.
        failed: the error of the step, if it can't run in this configuration.
    """

    family: Family
    micro_batch_size: int = 0
    chunks: ChunkLimits = ChunkLimits()
    parts: int = 0
    taken_bytes: int = 0
    seconds: float = 0.0
    rejected: str = ""
    rejected_as: Rejection | None = None
    gain: float = 1.0
    exact: bool = True
    prediction: Prediction | None = field(default=None, repr=False, compare=False)
    failed: Exception | None = field(default=None, repr=False, compare=False)

    @property
    def chunk_rows(self) -> int | None:
        """The most rows in a chunk of modules whose rows are independent; None if these run whole."""
        return self.chunks.rows

    @property
    def chunk_tokens(self) -> int | None:
        """The most tokens in a chunk of modules that take tokens one by one; None if these run whole."""
        return self.chunks.tokens

    @property
    def fits(self) -> bool:
        """Whether it fits the budget."""
        return not self.rejected

    @property
    def amount(self) -> str:
        """How much of the batch it takes at once, in words."""
        size = self.micro_batch_size
        rows = f"all {size} rows at once" if self.parts == 1 and size > 1 else _counted(size)
        return f"{rows}{self.chunks}"

    @property
    def largest(self) -> str:
        """The largest categories at the predicted peak, with their bytes; empty without a prediction."""
        if self.prediction is None:
            return ""
        at_peak = sorted(self.prediction.anatomy.at_peak.items(), key=lambda item: -item[1])
        return ", ".join(
            f"{category.replace('_', ' ')} {format_bytes(count)}"
            for category, count in at_peak[:_NAMED]
            if count and category in CATEGORIES
        )

    @property
    def words(self) -> str:
        """What it does and how much of the batch it takes at once, as a sentence says it."""
        return f"{self.family}, {self.amount}" if self.micro_batch_size else str(self.family)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The search problem.

    Attributes:
        predict: predicts a family at a micro-batch, and with modules in chunks if their limits are given, too; raises
            `UnavailableError`.
        floor: the least bytes that a family takes, known without a prediction.
        rows: rows of the whole batch.
        sizes: the micro-batch sizes to choose from, rising.
        is_whole: the step gets the whole batch, and `sizes` are rows of a chunk of its modules.
        tokens: of the longest row.
        usable_bytes: the most bytes that may be taken.
        beside_bytes: what a prediction's total includes but the budget does not: a GPU's context.
        times: operator times.
        goal: as in `Budget`.
        host_bytes_per_second: bandwidth of copies to the host, if anything is offloaded.
        residual: ratio of measured to predicted bytes in earlier runs on the device.
    """

    predict: Callable[..., Prediction]
    floor: Callable[[Family], int]
    rows: int
    sizes: Sequence[int]
    is_whole: bool = False
    tokens: int = 1
    usable_bytes: int
    beside_bytes: int
    times: Times
    goal: Goal
    host_bytes_per_second: float = 1.0
    residual: float = 1.0

    def sizes_of(self, family: Family) -> Sequence[int]:
        """A family's micro-batch sizes; released gradients can't be accumulated and need the whole batch."""
        return (self.rows,) if family.is_released else self.sizes

    def is_roomy(self, family: Family) -> bool:
        """Whether the whole batch probably fits: weights and gradients take little of what may be taken."""
        return not self.is_whole and 0 < self.floor(family) * _ROOMY <= self.usable_bytes

    def parts(self, size: int) -> int:
        """How many micro-batches of this size make the batch."""
        return -(-self.rows // size)

    def taken_bytes(self, prediction: Prediction) -> int:
        """The bytes that count for the budget, as earlier runs on the device had them."""
        return round((prediction.total_bytes - self.beside_bytes) * self.residual)

    def row(self, family: Family, size: int, chunk_tokens: int | None = None) -> Row:
        """The configuration of a family, of one of its sizes, and of the tokens of a chunk where there are such."""
        chunks = ChunkLimits(tokens=chunk_tokens)
        if self.is_whole:
            chunks, size = replace(chunks, rows=size if size < self.rows else None), self.rows
        try:
            prediction = self.predict(family, size, *([] if chunks == ChunkLimits() else [chunks]))
        except UnavailableError:
            raise
        except Exception as error:  # whatever the user's step raises with these choices
            said = str(error).strip().splitlines()
            reason = f"a step fails: {type(error).__name__}: {said[0] if said else ''}"
            return Row(
                family=family,
                micro_batch_size=size,
                chunks=chunks,
                rejected=reason,
                rejected_as="impossible",
                failed=error,
            )
        parts, taken = self.parts(size), self.taken_bytes(prediction)
        a_part, a_step = self._seconds(family, prediction)
        row = Row(
            family=family,
            micro_batch_size=size,
            chunks=chunks,
            parts=parts,
            taken_bytes=taken,
            # The last micro-batch may be smaller, so scale by rows: time is nearly proportional to them.
            seconds=a_part * self.rows / size + a_step,
            prediction=prediction,
        )
        if taken <= self.usable_bytes:
            return row
        reason = f"{row.amount}: {format_bytes(taken)}: {row.largest}"
        return replace(row, rejected=reason, rejected_as="too large")

    def _seconds(self, family: Family, prediction: Prediction) -> tuple[float, float]:
        """Seconds of a micro-batch, and of the optimizer's step: operators, and copies that don't overlap."""
        a_part, a_step = part_seconds(prediction.work, self.times), step_seconds(prediction.work, self.times)
        one_way = prediction.offloaded_apart_bytes / self.host_bytes_per_second
        offload = family["offload"].name
        if offload == ACTIVATIONS:  # copies to the host and back overlap with computation
            a_part = max(a_part, 2 * one_way)
        elif offload in (STATES, STATES_AND_ACTIVATIONS) and family.is_released:
            a_part += one_way  # a gradient waits for its states; copying them back overlaps with the backward
        elif offload in (STATES, STATES_AND_ACTIVATIONS):
            a_step += 2 * one_way
        if prediction.copied_bytes:  # gathered ahead, so it overlaps; the CPU steps
            a_part = max(a_part, prediction.copied_bytes / self.host_bytes_per_second)
            a_step = moved_bytes(prediction.work) / HOST_BYTES_PER_SECOND
        if family["ranks"].name == DDP:  # overlaps with the last backward
            sent = self.times.seconds(reduced(prediction.anatomy.largest.get("gradients", 0)))
            a_step += max(0.0, sent - a_part)
        return a_part, a_step


def _counted(rows: int) -> str:
    return "1 row at a time" if rows == 1 else f"{rows} rows at a time"
