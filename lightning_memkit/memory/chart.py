"""The timeline of a step as a stacked area chart, which page.html draws."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from lightning_memkit.memory.report import StepReport
from lightning_memkit.memory.timeline import Timeline
from lightning_memkit.memory.units import format_bytes

# Constant categories at the bottom, varying ones at the top, so that lower edges are flat.
STACK = (
    "weights", "optimizer_states", "compensation", "gradients", "communication", "inputs", "other",
    "saved_activations", "temporaries",
)  # fmt: skip
_LEVELS = 1000  # units of the drawing's height
_MOST_LINES = 6.5
_NEAR = 1.6  # times the peak; a higher budget is not drawn, since it would flatten the rest


def chart(report: StepReport, number: int = 0, most_bytes: int | None = None) -> dict[str, Any]:
    """The chart of a step; `number` is its id on the page, and charts may share the height `most_bytes`."""
    timeline = report.step.timeline
    if not timeline.ticks:
        return {}
    top = most_bytes or height_of(report)
    count = len(timeline.ticks)
    marked = timeline.peak_index if timeline.failed_at is None else timeline.failed_at
    ends = [index for _, index in timeline.phases[1:]] + [count]
    levels = {"budget": report.run.budget_bytes, "predicted peak": _predicted(report)}
    shown = {name: timeline.category_bytes[name] for name in STACK if name in timeline.category_bytes}
    return {
        "report": report,
        "id": f"step{number}",
        "count": count,
        "top": top,
        "peak": max(timeline.totals),
        "marked": marked,
        "marked_bytes": timeline.totals[marked],
        "marked_share": (marked + 0.5) / count,
        "grid": [(size, short_size(size)) for size in ticks_up_to(top)],
        "areas": list(_areas(timeline, top)),
        "levels": {name: size for name, size in levels.items() if 0 < size <= top},
        "phases": [(phase, end - begin) for (phase, begin), end in zip(timeline.phases, ends, strict=True)],
        "data": {
            "ticks": timeline.ticks,
            "category_bytes": shown,
            "phases": timeline.phases,
            "operators": timeline.operators,
            "operator_at": timeline.operator_at,
            "modules": timeline.modules,
            "module_at": timeline.module_at,
            "largest_modules": timeline.largest_modules,
            "marked": marked,
        },
    }


def height_of(report: StepReport) -> int:
    """The bytes at the upper edge: a little above the peak, and above a budget that is close."""
    peak = max(report.step.timeline.totals, default=1)
    near = [size for size in (report.run.budget_bytes, _predicted(report)) if peak < size <= _NEAR * peak]
    return math.ceil(1.05 * max([peak, *near]))


def ticks_up_to(top: int) -> Iterator[int]:
    """Three to six round sizes in binary units."""
    unit = 2 ** (10 * int(math.log2(max(1, top)) // 10))
    for power in range(-4, 10):
        step = max(1, int(unit * 2.0**power))
        if top / step < _MOST_LINES:
            yield from range(step, top + 1, step)
            return


def _predicted(report: StepReport) -> int:
    return 0 if report.predicted is None else report.predicted.peak_bytes


def _areas(timeline: Timeline, top: int) -> Iterator[tuple[str, str]]:
    """The name of each category with the outline of its area."""
    below = [0] * len(timeline.ticks)
    for name in STACK:
        own = timeline.category_bytes.get(name)
        if own is None:
            continue
        above = [low + size for low, size in zip(below, own, strict=True)]
        upper, lower = ([_LEVELS - round(_LEVELS * size / top) for size in edge] for edge in (above, below))
        yield name, _outline(upper, lower)
        below = above


def _outline(upper: Sequence[int], lower: Sequence[int]) -> str:
    """The path along the upper edge from left to right, and back along the lower one, in steps."""
    return f"M0 {upper[0]}{_steps(upper)}V{lower[-1]}{_steps(list(reversed(lower)), sign=-1)}Z"


def _steps(levels: Sequence[int], sign: int = 1) -> str:
    parts, run = [], 0
    for index, level in enumerate(levels):
        run += 1
        following = levels[index + 1] if index + 1 < len(levels) else None
        if following != level:
            parts.append(f"h{sign * run}")
            run = 0
            if following is not None:
                parts.append(f"v{following - level}")
    return "".join(parts)


def short_size(size: int) -> str:
    """A size as on the chart's axis: "2 GiB", without needless zeros."""
    number, unit = format_bytes(size).split()
    return f"{float(number):g} {unit}"
