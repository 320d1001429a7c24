"""What is searched for, and a configuration of it: whether it fits, and how long its step takes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lightning_memkit.memory.anatomy import CATEGORIES
from lightning_memkit.memory.units import format_bytes
from lightning_memkit.planning.budget import Goal
from lightning_memkit.planning.choices import ACTIVATIONS, DDP, STATES, STATES_AND_ACTIVATIONS, Family
from lightning_memkit.planning.times import Times, part_seconds, reduced, step_seconds
from lightning_memkit.prediction.result import Prediction

_NAMED = 4  # categories in a reason


class UnavailableError(ValueError):
    """A choice of a column that this module has nothing for: no blocks to checkpoint, no head to chunk the loss of."""

    def __init__(self, column: str, reason: str) -> None:
        super().__init__(column, reason)
        self.column, self.reason = column, reason

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True, kw_only=True)
class Row:
    """A configuration of a plan, or why there is none.

    Attributes:
        family: what is chosen.
        micro_batch_size: rows of a part; 0 where nothing was predicted.
        parts: of a loader's batch.
        taken_bytes: of the device; 0 where nothing was predicted.
        seconds: of an optimizer step, predicted; of the right order, and comparable among rows.
        rejected: why it is not to be had; empty where it fits.
        gain: the share of its time that fewer, larger parts could save at most.
        exact: whether this micro-batch was predicted; else it is estimated from the predictions of smaller ones.
        prediction: of this micro-batch, or of the largest that was predicted.
        failed: the error of the step, where it can't run so.
    """

    family: Family
    micro_batch_size: int = 0
    parts: int = 0
    taken_bytes: int = 0
    seconds: float = 0.0
    rejected: str = ""
    gain: float = 1.0
    exact: bool = True
    prediction: Prediction | None = field(default=None, repr=False, compare=False)
    failed: Exception | None = field(default=None, repr=False, compare=False)

    @property
    def fits(self) -> bool:
        """Whether it is within the budget."""
        return not self.rejected


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is searched for.

    Attributes:
        predict: the prediction of a family at a micro-batch; raises `UnavailableError`.
        floor: bytes that a family takes at the least, known without a prediction.
        rows: of the whole batch.
        sizes: the micro-batches that may be chosen, rising.
        usable_bytes: the most that may be taken.
        beside_bytes: what a prediction's total has that the budget is not for: a GPU's context.
        times: of operators.
        goal: as in `Budget`.
        host_bytes_per_second: of copies to the host, where anything is offloaded.
        residual: measured over predicted bytes, as earlier runs on the device had it.
    """

    predict: Callable[[Family, int], Prediction]
    floor: Callable[[Family], int]
    rows: int
    sizes: Sequence[int]
    usable_bytes: int
    beside_bytes: int
    times: Times
    goal: Goal
    host_bytes_per_second: float = 1.0
    residual: float = 1.0

    def sizes_of(self, family: Family) -> Sequence[int]:
        """The micro-batches that a family may have: released gradients can't be added up over parts."""
        return (self.rows,) if family.is_released else self.sizes

    def parts(self, size: int) -> int:
        """Of a batch at a micro-batch."""
        return -(-self.rows // size)

    def row(self, family: Family, size: int) -> Row:
        """A family at a micro-batch."""
        try:
            prediction = self.predict(family, size)
        except UnavailableError:
            raise
        except Exception as error:  # of the user's step, under what was chosen
            said = str(error).strip().splitlines()
            reason = f"a step fails: {type(error).__name__}: {said[0] if said else ''}"
            return Row(family=family, micro_batch_size=size, rejected=reason, failed=error)
        parts = self.parts(size)
        taken = round((prediction.total_bytes - self.beside_bytes) * self.residual)
        a_part, a_step = self._seconds(family, prediction)
        return Row(
            family=family,
            micro_batch_size=size,
            parts=parts,
            taken_bytes=taken,
            # The last part may be smaller; a part's time is nearly in proportion to its rows.
            seconds=a_part * self.rows / size + a_step,
            rejected="" if taken <= self.usable_bytes else _too_much(prediction, size, taken),
            prediction=prediction,
        )

    def _seconds(self, family: Family, prediction: Prediction) -> tuple[float, float]:
        """Of a part, and of the optimizer's step: operators, and copies that they don't hide."""
        a_part, a_step = part_seconds(prediction.work, self.times), step_seconds(prediction.work, self.times)
        one_way = prediction.offloaded_bytes / self.host_bytes_per_second
        offload = family["offload"].name
        if offload == ACTIVATIONS:  # beside the arithmetic, to the host and back
            a_part = max(a_part, 2 * one_way)
        elif offload in (STATES, STATES_AND_ACTIVATIONS) and family.is_released:
            a_part += one_way  # a gradient waits for its states, which leave beside the rest of the backward
        elif offload in (STATES, STATES_AND_ACTIVATIONS):
            a_step += 2 * one_way
        if family["ranks"].name == DDP:  # behind the last part's backward
            sent = self.times.seconds(reduced(prediction.anatomy.largest.get("gradients", 0)))
            a_step += max(0.0, sent - a_part)
        return a_part, a_step


def _too_much(prediction: Prediction, size: int, taken: int) -> str:
    """What takes how much."""
    at_peak = sorted(prediction.anatomy.at_peak.items(), key=lambda item: -item[1])
    named = ", ".join(
        f"{category.replace('_', ' ')} {format_bytes(count)}"
        for category, count in at_peak[:_NAMED]
        if count and category in CATEGORIES
    )
    return f"micro-batch {size} takes {format_bytes(taken)}: {named}"
