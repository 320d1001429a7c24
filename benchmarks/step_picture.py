"""Draws memory over one step, before and after memkit, from two runs; the README shows the drawing.

`python -m benchmarks.step_picture` trains the first and the last row of `before_and_after` anew (minutes, 10 GiB) and
writes `docs/pictures/step-light.svg` and `step-dark.svg`. `--reports BEFORE AFTER` draws what `MemoryReport` wrote in
runs of one's own. Colours are those of the report's page.
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from benchmarks.before_and_after import RUNS, report_of
from benchmarks.record import ROOT
from lightning_memkit.memory.chart import STACK, chart, height_of, short_size, ticks_up_to
from lightning_memkit.memory.report import StepReport
from lightning_memkit.memory.units import format_bytes

FOLDER = ROOT / "docs" / "pictures"
THEMES = ("light", "dark")
TITLES = ("plain Trainer, float32", "memkit: bf16 + checkpointing + budget")
WIDTH, PLOT_WIDTH, PLOT_HEIGHT, LEFT, TOP, GAP = 860, 370, 200, 58, 46, 40
COLUMN, ROW = 190, 20  # of the legend


def picture(before: StepReport, after: StepReport, theme: str) -> str:
    """Both steps side by side, at one scale of bytes."""
    colours, most = colours_of(theme), max(height_of(before), height_of(after))
    shown = [
        name for name in STACK if any(name in one.step.timeline.category_bytes for one in (before, after))
    ]
    legend_top = TOP + PLOT_HEIGHT + 44
    height = legend_top + ROW * -(-len(shown) // 4) + 6
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="13" fill="{colours["text"]}" role="img">',
        f"<title>{escape(_sentence(before, after))}</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="{colours["page"]}"/>',
    ]
    for place, (report, title) in enumerate(zip((before, after), TITLES, strict=True)):
        lines += _panel(report, title, LEFT + place * (PLOT_WIDTH + GAP), most, colours)
    for size in ticks_up_to(most):
        y = _height_at(size, most)
        lines.append(
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="{colours["dim"]}" font-size="12">'
            f"{short_size(size)}</text>"
        )
    for place, name in enumerate(shown):
        x, y = LEFT + place % 4 * COLUMN, legend_top + place // 4 * ROW
        lines.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" rx="2" fill="{colours[name]}"/>')
        lines.append(f'<text x="{x + 18}" y="{y}">{escape(name.replace("_", " "))}</text>')
    return "\n".join([*lines, "</svg>", ""])


def colours_of(theme: str) -> dict[str, str]:
    """The page's colours by their names, in one of `THEMES`."""
    css = files("lightning_memkit.memory").joinpath("page.css").read_text(encoding="utf-8")
    light, _, dark = css.partition("prefers-color-scheme: dark")
    of_dark, _, _ = dark.partition("}")
    found = dict(re.findall(r"--(\w+): (#\w{6})", light))
    return found if theme == "light" else {**found, **dict(re.findall(r"--(\w+): (#\w{6})", of_dark))}


def _panel(report: StepReport, title: str, left: int, most: int, colours: dict[str, str]) -> Iterator[str]:
    drawn, timeline = chart(report, most_bytes=most), report.step.timeline
    bottom = TOP + PLOT_HEIGHT
    yield f'<text x="{left}" y="24" font-weight="600">{escape(title)}: {format_bytes(drawn["peak"])}</text>'
    for size in ticks_up_to(most):
        y = _height_at(size, most)
        yield f'<path d="M{left} {y:.1f}h{PLOT_WIDTH}" stroke="{colours["line"]}" fill="none"/>'
    scale = f"translate({left} {TOP}) scale({PLOT_WIDTH / drawn['count']:.6g} {PLOT_HEIGHT / 1000:.6g})"
    yield f'<g transform="{scale}">'
    for name, outline in drawn["areas"]:
        yield f'<path d="{outline}" fill="{colours[name]}"/>'
    yield "</g>"
    if (budget := report.run.budget_bytes) and budget <= most:
        y = _height_at(budget, most)
        yield f'<path d="M{left} {y:.1f}h{PLOT_WIDTH}" stroke="{colours["mark"]}" stroke-dasharray="6 4" fill="none"/>'
        yield (
            f'<text x="{left + PLOT_WIDTH}" y="{y - 6:.1f}" text-anchor="end" fill="{colours["mark"]}">'
            f"budget {short_size(budget)}</text>"
        )
    yield f'<path d="M{left} {TOP}v{PLOT_HEIGHT}h{PLOT_WIDTH}" stroke="{colours["dim"]}" fill="none"/>'
    yield (
        f'<text x="{left}" y="{bottom + 18}" fill="{colours["dim"]}" font-size="12">'
        f"one optimizer step, {timeline.ticks[-1] - timeline.ticks[0] + 1:,} operators</text>"
    )


def _height_at(size: int, most: int) -> float:
    return TOP + PLOT_HEIGHT * (1 - size / most)


def _sentence(before: StepReport, after: StepReport) -> str:
    peaks = [format_bytes(max(one.step.timeline.totals)) for one in (before, after)]
    return f"Memory over one optimizer step: {peaks[0]} with a {TITLES[0]}, {peaks[1]} with {TITLES[1]}"


def main(words: Sequence[str] | None = None) -> int:
    """Draw both themes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_picture", description=__doc__)
    parser.add_argument(
        "--reports", nargs=2, type=Path, metavar=("BEFORE", "AFTER"), help="two memory_report.json"
    )
    parser.add_argument("--output", type=Path, default=FOLDER, help="the folder to write to")
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        paths = options.reports or [Path(folder) / name for name in ("before.json", "after.json")]
        if not options.reports:
            for path, plugins in zip(
                paths, (RUNS["plain Trainer, float32"], RUNS["+ MemoryBudget"]), strict=True
            ):
                report_of(["budget.yaml"], *plugins, path=path, seed=0)
        before, after = map(StepReport.from_json, paths)
    for theme in THEMES:
        (options.output / f"step-{theme}.svg").write_text(picture(before, after, theme), encoding="utf-8")
    print(_sentence(before, after))
    return 0


if __name__ == "__main__":
    sys.exit(main())
