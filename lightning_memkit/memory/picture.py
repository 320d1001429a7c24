"""The timeline of a step as a picture, through matplotlib."""

from pathlib import Path
from typing import Any

from lightning_memkit.memory.chart import STACK, height_of, marked_index, ticks_up_to
from lightning_memkit.memory.report import StepReport
from lightning_memkit.memory.units import format_bytes
from lightning_memkit.memory.words import OUTSIDE

_COLORS = {
    "weights": "#33598f", "optimizer_states": "#5f8fc9", "compensation": "#9cc0e6", "gradients": "#7a5ea8",
    "communication": "#b48ad0", "inputs": "#8a8f98", "other": "#b9bec6", "saved_activations": "#e08a2e",
    "temporaries": "#e8bd55",
}  # fmt: skip
_MARK = "#b3261e"
_NARROW = 0.055  # of the width: no room for a phase's name


class NoPictureError(ImportError):
    """matplotlib is not installed, which draws pictures; the page needs none."""


def write_picture(path: Path, report: StepReport) -> None:
    """Draw the timeline as PNG (or what else the path's suffix names); takes about a second and matplotlib.

    Raises:
        NoPictureError: matplotlib is not installed.
        ValueError: the report has no timeline.
    """
    timeline = report.step.timeline
    if not timeline.ticks:
        raise ValueError(
            "This report has no timeline to draw: it is of another version, or of no metered step."
        )
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NoPictureError(
            "A picture needs matplotlib, which is not installed: pip install matplotlib. The page (*.html) shows the "
            "same without it."
        ) from error
    figure = Figure(figsize=(10, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    names = [name for name in STACK if name in timeline.category_bytes]
    x = range(len(timeline.ticks))
    columns = [timeline.category_bytes[name] for name in names]
    labels = [name.replace("_", " ") for name in names]
    axes.stackplot(x, *columns, labels=labels, colors=[_COLORS[name] for name in names], step="post")
    top, marked = height_of(report), marked_index(report)
    if 0 < report.run.budget_bytes <= top:
        axes.axhline(report.run.budget_bytes, linestyle="--", color="#1b1f24", linewidth=1, label="budget")
    axes.axvline(marked, color=_MARK, linewidth=1.2)
    what = "out of memory at" if report.failure else "peak"
    anatomy = report.anatomy
    where = f"{anatomy.peak_module or OUTSIDE}: {anatomy.peak_operator}"
    axes.set_title(
        f"{report.run.name}: {what} {format_bytes(timeline.totals[marked])} in the {anatomy.peak_phase}\n{where}",
        loc="left",
        fontsize=10,
    )
    axes.set_xlim(0, max(1, len(timeline.ticks) - 1))
    axes.set_ylim(0, top)
    sizes = list(ticks_up_to(top))
    axes.set_yticks(sizes, [format_bytes(size) for size in sizes])
    ends = [index for _, index in timeline.phases[1:]] + [len(timeline.ticks)]
    for (phase, begin), end in zip(timeline.phases, ends, strict=True):
        axes.axvline(begin, color="#ffffff", linewidth=0.6)
        if end - begin >= _NARROW * len(timeline.ticks):
            axes.text((begin + end) / 2, -0.02 * top, phase, ha="center", va="top", fontsize=8)
    axes.set_xticks([])
    handles, texts = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], texts[::-1], loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8
    )
    figure.savefig(path)
