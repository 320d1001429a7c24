"""The bytes of a metered step by category over time."""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from lightning_memkit.memory.meter import Allocation, Phase

MOMENTS = 1200  # the most that are kept: of each stretch of time the highest
_MODULES_SHOWN = 3  # of a moment


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """What was alive over time; a long step is reduced to the highest moment of each of `MOMENTS` stretches.

    The peak is thus kept. All lists are as long as `ticks`; a tick is one allocation or one release.

    Args:
        ticks: the moments, rising.
        category_bytes: bytes alive at each moment, for each category that the step has.
        phases: each phase with its first moment's index, in order; with micro-batches each phase occurs
            several times.
        operators: names of operators.
        operator_at: for each moment, the operator that made the last allocation before it, as an index of
            `operators`.
        modules: names of modules; empty for what runs outside of any.
        module_at: the same for the module.
        largest_modules: for each moment the modules whose tensors, created in the step and still alive, take
            most: each an index of `modules` and bytes, the largest first.
        failed_at: the index of the moment at which memory ran out; None if it did not.
    """

    ticks: tuple[int, ...] = ()
    category_bytes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    phases: tuple[tuple[str, int], ...] = ()
    operators: tuple[str, ...] = ()
    operator_at: tuple[int, ...] = ()
    modules: tuple[str, ...] = ()
    module_at: tuple[int, ...] = ()
    largest_modules: tuple[tuple[tuple[int, int], ...], ...] = ()
    failed_at: int | None = None

    @property
    def totals(self) -> list[int]:
        """Bytes alive at each moment."""
        return [sum(column) for column in zip(*self.category_bytes.values(), strict=True)]

    @property
    def peak_index(self) -> int:
        """The index of the moment with the most bytes, the first if several are equal."""
        totals = self.totals
        return max(range(len(totals)), key=lambda index: (totals[index], -index)) if totals else 0


@dataclass(slots=True)
class _Moment:
    tick: int
    phase: Phase
    operator: str
    module: str
    live: dict[str, int]
    total: int


def timeline_of(
    records: Sequence[Allocation],
    sums: Iterable[tuple[int, int]],
    categories: Iterable[str],
    *,
    most: int = MOMENTS,
) -> Timeline:
    """The timeline of what a meter has recorded.

    Args:
        records: allocations with their categories.
        sums: the meter's `sums`: only metering keeps both summands alive during these.
        categories: in the order in which they are to be shown.
        most: the most moments to keep.
    """
    moments = list(_kept(_moments(records, sums, tuple(categories)), _last_tick(records), most))
    operators, modules = _Names(), _Names()
    operator_at = tuple(operators.index(moment.operator) for moment in moments)
    module_at = tuple(modules.index(moment.module) for moment in moments)
    largest = tuple(
        tuple((modules.index(name), size) for name, size in found)
        for found in _largest_modules(records, [moment.tick for moment in moments])
    )
    used = [name for name in categories if any(moment.live[name] for moment in moments)]
    phases: list[tuple[str, int]] = []
    for index, moment in enumerate(moments):
        if not phases or phases[-1][0] != moment.phase:
            phases.append((moment.phase, index))
    return Timeline(
        ticks=tuple(moment.tick for moment in moments),
        category_bytes={name: tuple(moment.live[name] for moment in moments) for name in used},
        phases=tuple(phases),
        operators=operators.names(),
        operator_at=operator_at,
        modules=modules.names(),
        module_at=module_at,
        largest_modules=largest,
    )


def most_of(records: Sequence[Allocation], category: str) -> int:
    """The tick at which a category has the most bytes, the first if several are equal."""
    changes = [(one.born, one.size_bytes) for one in records if one.category == category]
    changes += [
        (one.died, -one.size_bytes) for one in records if one.category == category and one.died is not None
    ]
    live = most = tick = 0
    for when, change in sorted(changes):
        live += change
        if live > most:
            most, tick = live, when
    return tick


class _Names:
    """Assigns indices to names in the order in which they occur."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def index(self, name: str) -> int:
        return self._known.setdefault(name, len(self._known))

    def names(self) -> tuple[str, ...]:
        return tuple(self._known)


def _last_tick(records: Sequence[Allocation]) -> int:
    return max((max(one.born, one.died or 0) for one in records), default=0)


def _largest_modules(records: Sequence[Allocation], ticks: Iterable[int]) -> Iterator[list[tuple[str, int]]]:
    """After each of these ticks, the modules whose tensors take most of what the step has created."""
    changes = sorted(_changes(one for one in records if one.maker is not None), key=_tick_of)
    live: dict[str, int] = {}
    done = 0
    for tick in ticks:
        while done < len(changes) and changes[done][0] <= tick:
            _, change, record = changes[done]
            live[record.origin] = live.get(record.origin, 0) + change
            done += 1
        found = heapq.nlargest(_MODULES_SHOWN, live.items(), key=lambda item: item[1])
        yield [(name, size) for name, size in found if size]


def _changes(records: Iterable[Allocation]) -> Iterator[tuple[int, int, Allocation]]:
    """Each birth and each death: its tick, the change in bytes, and what was born or died."""
    for record in records:
        yield record.born, record.size_bytes, record
        if record.died is not None:
            yield record.died, -record.size_bytes, record


def _tick_of(change: tuple[int, int, Allocation]) -> int:
    return change[0]


def _moments(
    records: Sequence[Allocation], sums: Iterable[tuple[int, int]], categories: tuple[str, ...]
) -> Iterator[_Moment]:
    """What is alive after each tick of the step; the first moment is what existed before it."""
    changes = sorted(_changes(records), key=_tick_of)
    live, total, last = dict.fromkeys(categories, 0), 0, None
    open_sums = iter([*sorted(sums), (1 << 62, 1 << 62)])
    began, settled = next(open_sums)
    before = None
    for tick, change, record in changes:
        live[record.category or "other"] += change
        total += change
        if change > 0 and record.maker is not None:
            last = record
        while tick >= settled:
            began, settled = next(open_sums)
        if last is None:  # the step has not begun
            before = _Moment(tick, "outside", "", "", dict(live), total)
            continue
        if began < tick < settled:
            continue
        if before is not None:
            yield before
            before = None
        yield _Moment(tick, last.phase, str(last.maker), last.origin, dict(live), total)
    if before is not None:
        yield before


def _kept(moments: Iterator[_Moment], last_tick: int, most: int) -> Iterator[_Moment]:
    """The highest moment of each stretch of the clock, and the very last one."""
    every = max(1.0, (last_tick + 1) / most)
    highest, stretch, moment = None, -1, None
    for moment in moments:
        own = int(moment.tick / every)
        if own != stretch and highest is not None:
            yield highest
            highest = None
        if highest is None or moment.total > highest.total:
            highest, stretch = moment, own
    if highest is not None:
        yield highest
    if moment is not None and moment is not highest:
        yield moment
