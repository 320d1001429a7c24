"""The largest micro-batch of a configuration that fits, from a few predictions and lines through them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from lightning_memkit.planning.choices import Family
from lightning_memkit.planning.problem import Problem, Row
from lightning_memkit.planning.times import part_seconds
from lightning_memkit.prediction.lines import PeakLines
from lightning_memkit.prediction.result import Prediction

_MOST_TRIES = 5  # to confirm a micro-batch; usually the first succeeds
_FEW_ROWS = (2, 4)  # rows of the predictions through which lines go
# The whole batch accumulates no gradients, so it may take less than the line through micro-batches says.
_WHOLE_BATCH = 0.8


def best_size(family: Family, problem: Problem) -> Row:
    """The largest size that fits: fewer micro-batches or chunks are faster. For the goal "memory" the smallest."""
    sizes = problem.sizes_of(family)
    if problem.is_whole:
        return _largest_chunk(family, problem)
    *smaller, whole = sizes
    known: dict[int, Row] = {}

    def row(size: int) -> Row:
        if size not in known:
            known[size] = problem.row(family, size)
        return known[size]

    if problem.goal == "memory" or not smaller:
        return row(sizes[0])
    if problem.is_roomy(family) and row(whole).fits:
        return row(whole)
    if not row(sizes[0]).fits:
        return row(sizes[0])
    # Weights and gradients take the same for any number of rows; all else grows in proportion to them at the most.
    fixed = min(problem.floor(family), row(sizes[0]).taken_bytes)
    most = fixed + (row(sizes[0]).taken_bytes - fixed) * whole / sizes[0]
    if most <= problem.usable_bytes and row(whole).fits:
        return row(whole)
    # Don't start a line at one row: some copies for several rows are views for one.
    few = [size for size in smaller if size in _FEW_ROWS] or [sizes[0]]
    if not row(few[-1]).fits:
        smaller, few = smaller[: smaller.index(few[-1])], [sizes[0], few[-1]]
    taken = reach(
        {size: (one, row(size).taken_bytes) for size in few if (one := row(size).prediction) is not None}
    )
    # The whole batch may fit even if the line says that it exceeds the budget a little.
    if few[0] in _FEW_ROWS and taken(whole) * _WHOLE_BATCH <= problem.usable_bytes and row(whole).fits:
        return row(whole)
    size = max((size for size in smaller if taken(size) <= problem.usable_bytes), default=sizes[0])
    return _estimated([row(size) for size in few], size, taken(size), problem)


def smallest(family: Family, problem: Problem) -> Row:
    """What fits if anything of a family does: its smallest size; where there is room, all at once, which may do."""
    sizes = problem.sizes_of(family)
    if problem.goal != "memory" and problem.is_roomy(family):
        whole = problem.row(family, sizes[-1])
        if whole.fits:
            return whole
    return problem.row(family, sizes[0])


def _largest_chunk(family: Family, problem: Problem) -> Row:
    """The largest chunk that fits, or all rows at once; each is predicted, since no line leads over their number."""
    sizes = problem.sizes_of(family)
    best = problem.row(family, sizes[0])
    if problem.goal == "memory" or not best.fits:
        return best
    fits, too_large = 0, len(sizes)
    while too_large - fits > 1:
        # All rows first: in one chunk they are run once.
        tried = len(sizes) - 1 if too_large == len(sizes) else (fits + too_large) // 2
        row = problem.row(family, sizes[tried])
        if row.fits:
            best, fits = row, tried
        else:
            too_large = tried
    return best


def _estimated(rows: Sequence[Row], size: int, taken: float, problem: Problem) -> Row:
    """Extrapolate a micro-batch from those that were predicted; its time follows the line through theirs."""
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
        rejected_as=None,
        micro_batch_size=size,
        parts=problem.parts(size),
        taken_bytes=int(taken),
        seconds=seconds,
        gain=gain,
        exact=False,
    )


def reach(predicted: Mapping[int, tuple[Prediction, int]]) -> Callable[[int], float]:
    """A function from a micro-batch size to its bytes, by lines through predictions.

    Args:
        predicted: by micro-batch size the prediction, and the bytes that it takes (reserved bytes on a GPU).
    """
    first, last = min(predicted), max(predicted)
    prediction, taken = predicted[last]
    if first == last:
        return lambda size: float(taken)
    # On a GPU: the ratio of reserved to live bytes, which is nearly constant.
    over = taken / max(1, prediction.peak_bytes)
    try:
        lines = PeakLines.through({size: one for size, (one, _) in predicted.items()})
    except ValueError:  # the sizes run different operators
        slope = (taken - predicted[first][1]) / (last - first)
        return lambda size: taken + slope * (size - last)
    return lambda size: lines.peak_bytes(size) * over


def confirmed(row: Row, problem: Problem) -> Row:
    """The row predicted at its own micro-batch, or at a smaller one if it takes more than estimated."""
    sizes = problem.sizes_of(row.family)
    smaller = [size for size in sizes if size <= row.micro_batch_size]
    for size in reversed(smaller[-_MOST_TRIES:]):
        found = problem.row(row.family, size)
        if found.fits:
            return found
    return problem.row(row.family, sizes[0])
