"""Find the configurations that fit: a few predictions each, none for what others show to be out of reach or idle."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from lightning_memkit.memory.anatomy import CATEGORIES
from lightning_memkit.memory.units import format_bytes
from lightning_memkit.planning.budget import Goal
from lightning_memkit.planning.choices import ACTIVATIONS, DDP, STATES, Family, is_lighter
from lightning_memkit.planning.times import Times, part_seconds, reduced, step_seconds
from lightning_memkit.prediction.lines import PeakLines
from lightning_memkit.prediction.result import Prediction

_MOST_TRIES = 5  # to confirm a micro-batch; the first is as a rule the last
_FEW_ROWS = (2, 4)  # of the predictions that lines go through
_WHOLE_BATCH = 0.8
_APART = ("precision", "ranks", "offload")  # what keeps the least is known within such a group
_LITTLE = 0.05  # of a step's time: a tie
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
        taken = prediction.total_bytes - self.beside_bytes
        a_part, a_step = part_seconds(prediction.work, self.times), step_seconds(prediction.work, self.times)
        if family["offload"].name == ACTIVATIONS:  # beside the arithmetic, to the host and back
            a_part = max(a_part, 2 * prediction.host_bytes / self.host_bytes_per_second)
        elif family["offload"].name == STATES:
            a_step += 2 * prediction.host_bytes / self.host_bytes_per_second
        if family["ranks"].name == DDP:  # behind the last part's backward
            sent = self.times.seconds(reduced(prediction.anatomy.largest.get("gradients", 0)))
            a_step += max(0.0, sent - a_part)
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


def search(families: Sequence[Family], problem: Problem) -> tuple[tuple[Row, ...], dict[str, str]]:
    """All families, those that fit first and the best of them before all others.

    Returns:
        The rows, and the columns of which nothing can be chosen here, with the reason.
    """
    floors = {family: problem.floor(family) for family in families}
    within = [family for family in families if floors[family] <= problem.usable_bytes]
    if not within:  # the least is predicted, to say what it takes
        within = [family for family in families if floors[family] == min(floors.values())]
    left, missing, found = list(families), dict[str, str](), list[Row]()
    rows = [
        Row(family=family, rejected=f"weights and gradients alone take {format_bytes(floors[family])}")
        for family in families
        if family not in within
    ]
    for _, group in groupby(within, key=lambda family: tuple(family[column].name for column in _APART)):
        inner = [family for family in group if family in left]
        rows += _of_one_precision(inner, problem, missing, found)
        left = _without(left, missing)
    rows = [row for row in rows if row.family in left]
    failed = next((row.failed for row in rows if row.failed is not None), None)
    if failed is not None and not any(row.prediction is not None for row in rows):
        raise failed
    rows.sort(key=lambda row: _rank(row, problem.goal))
    while rows[0].fits and not rows[0].exact:  # what is to be taken is predicted as it will run
        rows[0] = _confirmed(rows[0], problem)
        rows.sort(key=lambda row: _rank(row, problem.goal))
    return tuple(rows), missing


def _confirmed(row: Row, problem: Problem) -> Row:
    """The row predicted; with the next smaller micro-batch where it takes more than was estimated."""
    sizes = [size for size in problem.sizes if size <= row.micro_batch_size]
    for size in reversed(sizes[-_MOST_TRIES:]):
        found = problem.row(row.family, size)
        if found.fits:
            return found
    return problem.row(row.family, problem.sizes[0])


def _without(families: Sequence[Family], missing: Mapping[str, str]) -> list[Family]:
    """Those whose choices in the missing columns are the plainest."""
    return [family for family in families if not any(family[column].callbacks for column in missing)]


def _of_one_precision(
    families: list[Family], problem: Problem, missing: dict[str, str], found: list[Row]
) -> list[Row]:
    """The family that keeps the least goes first: what does not fit then fits with none of the others."""
    rows: list[Row] = []
    left, least = families, None
    while least is None:
        left = _without(left, missing)
        if not left:
            return rows
        try:
            least = problem.row(left[-1], problem.sizes[0])
        except UnavailableError as error:
            missing[error.column] = error.reason
        if least is not None and least.failed is not None:
            rows.append(least)
            left, least = left[:-1], None
    if not least.fits:
        reason = f"more than with {least.family['checkpointing'].name} checkpointing, which does not fit"
        return [*rows, least, *(Row(family=family, rejected=reason) for family in left[:-1])]
    for family in left:
        lighter = (row for row in found if row.fits and is_lighter(row.family, family))
        reason = next((_idle(row) for row in lighter if _idle(row)), "") if problem.goal != "memory" else ""
        rows.append(Row(family=family, rejected=reason) if reason else _best(family, problem))
        found.append(rows[-1])
    return rows


def _idle(row: Row) -> str:
    """Why what computes more than a row that fits is not needed; empty where it may be faster."""
    if row.parts == 1:
        return f"not needed: the whole batch fits with {row.family}"
    if row.gain <= _LITTLE:
        return (
            f"slower: {row.family} fits, and parts of more than its {row.micro_batch_size} rows gain nothing"
        )
    return ""


def _best(family: Family, problem: Problem) -> Row:
    """The largest micro-batch that fits: fewer parts are faster; for the least memory the smallest."""
    *smaller, whole = problem.sizes
    known: dict[int, Row] = {}

    def row(size: int) -> Row:
        if size not in known:
            known[size] = problem.row(family, size)
        return known[size]

    if problem.goal == "memory" or not smaller:
        return row(problem.sizes[0])
    if not row(problem.sizes[0]).fits:
        return row(problem.sizes[0])
    # A single row is no good end of a line: what is a copy for several is a view for one.
    few = [size for size in smaller if size in _FEW_ROWS] or [problem.sizes[0]]
    if not row(few[-1]).fits:
        smaller, few = smaller[: smaller.index(few[-1])], [problem.sizes[0], few[-1]]
    reach = _reach([row(size) for size in few], problem)
    # Of the whole batch nothing is accumulated: it takes less than the line through parts says.
    if few[0] in _FEW_ROWS and reach(whole) * _WHOLE_BATCH <= problem.usable_bytes and row(whole).fits:
        return row(whole)
    size = max((size for size in smaller if reach(size) <= problem.usable_bytes), default=problem.sizes[0])
    return _estimated([row(size) for size in few], size, reach(size), problem)


def _estimated(rows: Sequence[Row], size: int, taken: float, problem: Problem) -> Row:
    """A micro-batch by those that were predicted: its time grows as theirs does."""
    last = rows[-1]
    a_part = [part_seconds(row.prediction.work, problem.times) for row in rows if row.prediction is not None]
    each = a_part[-1] / last.micro_batch_size
    if len(rows) > 1:
        slope = (a_part[-1] - a_part[0]) / (last.micro_batch_size - rows[0].micro_batch_size)
        each = min(each, max(slope, 0.0))
    more = a_part[-1] + each * (size - last.micro_batch_size)
    a_step = last.seconds - a_part[-1] * problem.rows / last.micro_batch_size
    seconds = more * problem.rows / size + a_step
    gain = 1 - (each * problem.rows + a_step) / seconds
    known = next((row for row in rows if row.micro_batch_size == size), None)
    if known is not None:
        return replace(known, gain=gain)
    return replace(
        last,
        rejected="",
        micro_batch_size=size,
        parts=problem.parts(size),
        taken_bytes=int(taken),
        seconds=seconds,
        gain=gain,
        exact=False,
    )


def _reach(rows: Sequence[Row], problem: Problem) -> Callable[[int], float]:
    """From a micro-batch to what it takes, by the lines through some."""
    last = rows[-1]
    predictions = {row.micro_batch_size: row.prediction for row in rows if row.prediction is not None}
    if len(predictions) < 2 or last.prediction is None:
        return lambda size: float(last.taken_bytes)
    # Of a GPU's allocator: what it reserves over what is alive, nearly in proportion.
    over = last.taken_bytes / max(1, last.prediction.peak_bytes)
    try:
        lines = PeakLines.through(predictions)
    except ValueError:  # other operators for other sizes
        first = rows[0]
        slope = (last.taken_bytes - first.taken_bytes) / (last.micro_batch_size - first.micro_batch_size)
        return lambda size: last.taken_bytes + slope * (size - last.micro_batch_size)
    return lambda size: lines.peak_bytes(size) * over


def _rank(row: Row, goal: Goal) -> tuple[bool, float, float]:
    if goal == "memory":
        return (not row.fits, row.taken_bytes, row.seconds)
    return (not row.fits, row.seconds, row.taken_bytes)


def _too_much(prediction: Prediction, size: int, taken: int) -> str:
    """What takes how much."""
    at_peak = sorted(prediction.anatomy.at_peak.items(), key=lambda item: -item[1])
    named = ", ".join(
        f"{category.replace('_', ' ')} {format_bytes(count)}"
        for category, count in at_peak[:_NAMED]
        if count and category in CATEGORIES
    )
    return f"micro-batch {size} takes {format_bytes(taken)}: {named}"
