"""The timeline of a step as a stacked area, in HTML that needs no library."""

import json
import math
from collections.abc import Iterator, Sequence
from html import escape

from lightning_memkit.memory.report import StepReport
from lightning_memkit.memory.timeline import Timeline
from lightning_memkit.memory.units import format_bytes

# From what stays to what comes and goes, so that the lower edges are still.
STACK = (
    "weights", "optimizer_states", "compensation", "gradients", "communication", "inputs", "other",
    "saved_activations", "temporaries",
)  # fmt: skip
_LEVELS = 1000  # of the drawing's height
_MOST_LINES = 6.5
_RIGHT = 0.7  # a mark further to the right would cross the words at that end
_NEAR = 1.6  # times the peak: a budget further up would press the rest down
_NARROW, _SHORT = 0.055, 0.22  # of the width: no room for a phase's name, or none on a small screen


def chart(report: StepReport, number: int = 0, most_bytes: int | None = None) -> str:
    """The chart of a step; `number` tells several on a page apart, which share `most_bytes` as their height."""
    timeline = report.step.timeline
    if not timeline.ticks:
        return '<p class="dim">This report has no timeline.</p>'
    top = most_bytes or height_of(report)
    data = json.dumps(_data(report), separators=(",", ":")).replace("<", "\\u003c")
    return "\n".join(
        (
            f'<div class="plot" data-of="step{number}" tabindex="0" role="img" aria-label="{escape(_words(report))}">',
            *_grid(top),
            f'<svg viewBox="0 0 {len(timeline.ticks)} {_LEVELS}" preserveAspectRatio="none" aria-hidden="true">',
            *_areas(timeline, top),
            "</svg>",
            *_levels(report, top),
            _mark(report),
            '<div class="cursor" hidden></div><div class="tip" hidden></div>',
            "</div>",
            _phases(timeline),
            _legend(timeline),
            f'<script type="application/json" id="step{number}">{data}</script>',
        )
    )


def height_of(report: StepReport) -> int:
    """The bytes at the upper edge: a little above the peak, and above a budget that is near."""
    peak = max(report.step.timeline.totals, default=1)
    near = [size for size in (report.run.budget_bytes, _predicted(report)) if peak < size <= _NEAR * peak]
    return math.ceil(1.05 * max([peak, *near]))


def marked_index(report: StepReport) -> int:
    """The moment that is marked: the peak, or where memory ran out."""
    timeline = report.step.timeline
    return timeline.peak_index if timeline.failed_at is None else timeline.failed_at


def ticks_up_to(top: int) -> Iterator[int]:
    """Round sizes in binary units, three to six of them."""
    unit = 2 ** (10 * int(math.log2(max(1, top)) // 10))
    for power in range(-4, 10):
        step = max(1, int(unit * 2.0**power))
        if top / step < _MOST_LINES:
            yield from range(step, top + 1, step)
            return


def _predicted(report: StepReport) -> int:
    return 0 if report.predicted is None else report.predicted.peak_bytes


def _data(report: StepReport) -> dict[str, object]:
    timeline = report.step.timeline
    shown = {name: timeline.category_bytes[name] for name in STACK if name in timeline.category_bytes}
    return {
        "ticks": timeline.ticks,
        "category_bytes": shown,
        "phases": timeline.phases,
        "operators": timeline.operators,
        "operator_at": timeline.operator_at,
        "modules": timeline.modules,
        "module_at": timeline.module_at,
        "marked": marked_index(report),
    }


def _areas(timeline: Timeline, top: int) -> Iterator[str]:
    below = [0] * len(timeline.ticks)
    for name in STACK:
        own = timeline.category_bytes.get(name)
        if own is None:
            continue
        above = [low + size for low, size in zip(below, own, strict=True)]
        upper = [_level(size, top) for size in above]
        lower = [_level(size, top) for size in below]
        yield f'<path fill="var(--{name})" d="{_outline(upper, lower)}"/>'
        below = above


def _level(size: int, top: int) -> int:
    return _LEVELS - round(_LEVELS * size / top)


def _outline(upper: Sequence[int], lower: Sequence[int]) -> str:
    """From left to right along the upper edge, and back along the lower one, in steps."""
    forth = _steps(upper)
    back = _steps(list(reversed(lower)), sign=-1)
    return f"M0 {upper[0]}{forth}V{lower[-1]}{back}Z"


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


def _grid(top: int) -> Iterator[str]:
    for size in ticks_up_to(top):
        yield f'<div class="grid" style="bottom:{100 * size / top:.3f}%"><span>{_round(size)}</span></div>'


def _round(size: int) -> str:
    number, unit = format_bytes(size).split()
    return f"{float(number):g} {unit}"


def _levels(report: StepReport, top: int) -> Iterator[str]:
    """Dashed lines: what there is, and what was predicted."""
    peak = max(report.step.timeline.totals)
    for name, size in (("budget", report.run.budget_bytes), ("predicted peak", _predicted(report))):
        if 0 < size <= top:
            side = ("" if size >= peak else " below") + (" start" if _mark_share(report) > _RIGHT else "")
            style = f"bottom:{100 * size / top:.3f}%"
            yield f'<div class="level{side}" style="{style}"><span>{name} {format_bytes(size)}</span></div>'


def _mark_share(report: StepReport) -> float:
    """How far to the right the mark is."""
    return (marked_index(report) + 0.5) / len(report.step.timeline.ticks)


def _mark(report: StepReport) -> str:
    timeline, index, x = report.step.timeline, marked_index(report), _mark_share(report)
    module = report.anatomy.peak_module or "the step itself"
    what = "out of memory at" if report.failure else "peak"
    words = escape(f"{what} {format_bytes(timeline.totals[index])}")
    where = escape(f", {module}: {report.anatomy.peak_operator}")
    side = " left" if x > 0.5 else ""
    label = f'<span>{words}<span class="wide">{where}</span></span>'
    return f'<div class="mark{side}" style="left:{100 * x:.3f}%">{label}</div>'


def _phases(timeline: Timeline) -> str:
    count = len(timeline.ticks)
    ends = [index for _, index in timeline.phases[1:]] + [count]
    parts = []
    for (phase, begin), end in zip(timeline.phases, ends, strict=True):
        share = (end - begin) / count
        shown = phase if share >= _SHORT else f'<span class="wide">{phase}</span>' if share >= _NARROW else ""
        parts.append(f'<span class="{phase}" style="flex:{end - begin} 0 0" title="{phase}">{shown}</span>')
    return f'<div class="phases" aria-hidden="true">{"".join(parts)}</div>'


def _legend(timeline: Timeline) -> str:
    shown = [name for name in reversed(STACK) if name in timeline.category_bytes]
    items = [
        f'<li><i class="swatch" style="background:var(--{name})"></i>{name.replace("_", " ")}</li>'
        for name in shown
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'


def _words(report: StepReport) -> str:
    anatomy = report.anatomy
    at = ", ".join(
        f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in anatomy.at_peak.items() if size
    )
    what = "when memory ran out" if report.failure else "at the peak"
    return f"Bytes alive during a training step; {what}: {format_bytes(anatomy.peak_bytes)}: {at}."
