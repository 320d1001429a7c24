"""A report as one HTML file that needs a browser and nothing else: no network, no library."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

import lightning_memkit
from lightning_memkit.memory.anatomy import CATEGORIES
from lightning_memkit.memory.chart import STACK, chart, height_of
from lightning_memkit.memory.kinds import KINDS, alike
from lightning_memkit.memory.report import StepReport
from lightning_memkit.memory.units import format_bytes
from lightning_memkit.memory.words import (
    OUTSIDE,
    UNMETERED,
    difference,
    flops_words,
    run_words,
    share,
    time_share,
)  # fmt: skip

_MODULES = 20  # in a table
_NUMBER = "n"


def write_page(path: Path, text: str) -> None:
    """Write a page; a reader never sees half a file."""
    staged = path.with_suffix(".tmp")
    staged.write_text(text, encoding="utf-8")
    staged.replace(path)


def page(report: StepReport) -> str:
    """The page of one report."""
    title = f"{report.run.name or 'A model'}: memory of a training step"
    return _document(
        title,
        [
            f"<h1>{escape(title)}</h1>",
            f'<p class="dim">{escape(run_words(report))}</p>',
            *_failure(report),
            _facts(report),
            *([chart(report)] if report.metered else []),
            "<h2>By category</h2>",
            _categories(report),
            *_kinds(report),
            *_modules(report),
            *_findings(report),
            *_advice(report),
        ],
    )


def comparison_page(one: StepReport, other: StepReport, names: tuple[str, str]) -> str:
    """The page of two reports side by side: timelines of one scale, and the differences."""
    top = max(height_of(one), height_of(other))
    title = f"{names[0]} and {names[1]}: memory of a training step"
    body = [f"<h1>{escape(title)}</h1>"]
    for number, (name, report) in enumerate(zip(names, (one, other), strict=True)):
        body += [
            f"<h2>{escape(name)}</h2>",
            f'<p class="dim">{escape(run_words(report))}</p>',
            *_failure(report),
            chart(report, number, top),
        ]
    rows = [
        (
            (name.replace("_", " "), f"--{name}"),
            *(format_bytes(report.anatomy.at_peak.get(name, 0)) for report in (one, other)),
            difference(one.anatomy.at_peak.get(name, 0), other.anatomy.at_peak.get(name, 0)),
        )
        for name in CATEGORIES
        if one.anatomy.at_peak.get(name) or other.anatomy.at_peak.get(name)
    ]
    peaks = one.anatomy.peak_bytes, other.anatomy.peak_bytes
    last = ("peak", *map(format_bytes, peaks), difference(*peaks))
    columns = ("category", *names, "difference")
    body += ["<h2>At the peak, by category</h2>", _table(columns, (1, 2, 3), rows, last=last)]
    return _document(title, body)


def _document(title: str, body: Iterable[str]) -> str:
    folder = files("lightning_memkit.memory")
    style, script = (folder.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    return "\n".join(
        (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>",
            *body,
            f"<footer>lightning_memkit {lightning_memkit.__version__}. Bytes are those of tensors. The x axis is the "
            "order of allocations and releases, not time.</footer>",
            f"<script>\n{script}</script>\n</body>\n</html>\n",
        )
    )


def _failure(report: StepReport) -> Iterator[str]:
    if not report.failure:
        return
    where = f" in the {report.anatomy.peak_phase}, at {_peak(report)}. What is shown lived then."
    if not report.metered:
        where = f". {escape(UNMETERED)}"
    yield (
        f'<div class="failed"><strong>This step ran out of memory</strong>{where}<br>'
        f"<code>{escape(report.failure)}</code></div>"
    )


def _facts(report: StepReport) -> str:
    anatomy, run, predicted = report.anatomy, report.run, report.predicted
    found = [("alive then" if report.failure else "peak", format_bytes(anatomy.peak_bytes))]
    if run.budget_bytes:
        found.append(("budget", format_bytes(run.budget_bytes)))
    if predicted is not None and predicted.peak_bytes:
        found.append(("predicted", format_bytes(predicted.peak_bytes)))
    if run.forecast_bytes:
        found.append(("MemoryBudget's forecast", format_bytes(run.forecast_bytes)))
    rates = report.rates
    for name in ("tokens", "samples"):
        if f"{name}_per_second" in rates:
            found.append((f"{name} a second", f"{rates[f'{name}_per_second']:,.0f}"))
    if "mfu" in rates:
        found.append(("MFU", f"{rates['mfu']:.1%}"))
    if report.flops.units:
        unit = "token" if report.flops.tokens else "sample"
        found.append((f"operations a {unit}", flops_words(report.flops.model / report.flops.units)))
    if run.retries:
        found.append(("retries", str(run.retries)))
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in found)
    where = "" if report.failure else f"<p>The peak is in the {anatomy.peak_phase}, at {_peak(report)}.</p>"
    return f'<dl class="facts">{items}</dl>{where}'


def _peak(report: StepReport) -> str:
    anatomy = report.anatomy
    place = f", called at <code>{escape(anatomy.peak_place)}</code>" if anatomy.peak_place else ""
    module = escape(anatomy.peak_module) or "the step itself, outside of its modules"
    return f"<code>{escape(anatomy.peak_operator)}</code> in <strong>{module}</strong>{place}"


def _categories(report: StepReport) -> str:
    anatomy, predicted = report.anatomy, report.predicted
    foreseen = {} if predicted is None else predicted.at_peak
    has_prediction = predicted is not None and predicted.peak_bytes > 0
    columns = ["category", "then" if report.failure else "at the peak", "share", "at its largest"]
    columns += ["predicted", "difference"] if has_prediction else []
    rows = []
    for name in sorted(CATEGORIES, key=STACK.index):
        size, largest = anatomy.at_peak.get(name, 0), anatomy.largest.get(name, 0)
        if not (size or largest or foreseen.get(name)):
            continue
        cells = [format_bytes(size), share(size, anatomy.peak_bytes), format_bytes(largest)]
        if has_prediction:
            cells += [format_bytes(foreseen.get(name, 0)), difference(foreseen.get(name, 0), size)]
        rows.append(((name.replace("_", " "), f"--{name}"), *cells, CATEGORIES[name]))
    last = ["all", format_bytes(anatomy.peak_bytes), "", ""]
    if has_prediction and predicted is not None:
        last += [format_bytes(predicted.peak_bytes), difference(predicted.peak_bytes, anatomy.peak_bytes)]
    note = f'<p class="dim">Beside the tensors: {format_bytes(anatomy.fixed_bytes)} (context, other processes, the '
    note += "process itself), outside the budget."
    if predicted is not None and predicted.what:
        note += f" {escape(predicted.what)}."
    wide = (3, len(columns)) if has_prediction else (len(columns),)
    table = _table((*columns, "what it is"), range(1, len(columns)), rows, last=(*last, ""), wide=wide)
    return f"{table}{note}</p>"


def _kinds(report: StepReport) -> Iterator[str]:
    kinds = {name: found for name, found in report.step.kinds.items() if found.allocated}
    if not kinds:
        return
    yield "<h2>By kind of operator</h2>"
    columns = ("kind", _saved_then(report), "saved at most", "allocated in the step", "what it is")
    rows = [
        (name, *map(format_bytes, (one.saved_at_peak, one.saved_at_most, one.allocated)), KINDS.get(name, ""))
        for name, one in kinds.items()
    ]
    yield _table(columns, (1, 2, 3), rows, wide=(4,))


def _modules(report: StepReport) -> Iterator[str]:
    modules = {name: one for name, one in report.step.modules.items() if one.saved_at_most}
    if not modules:
        return
    yield "<h2>Modules that saved most for the backward</h2>"
    total = sum(one.saved_at_most for one in modules.values())
    groups = alike(modules)
    rows = [
        (
            name or OUTSIDE,
            str(count),
            format_bytes(one.saved_at_most),
            share(one.saved_at_most, total),
            format_bytes(one.saved_at_peak),
        )
        for name, (count, one) in list(groups.items())[:_MODULES]
    ]
    columns = ("module", "how many", "saved at most", "share", _saved_then(report))
    yield _table(columns, (1, 2, 3, 4), rows, wide=(4,))
    if len(groups) > _MODULES:
        yield f'<p class="dim">{len(groups) - _MODULES} more are in the JSON, each module by itself.</p>'


def _saved_then(report: StepReport) -> str:
    return "saved then" if report.failure else "saved at the peak"


def _findings(report: StepReport) -> Iterator[str]:
    if not report.anatomy.findings:
        return
    yield "<h2>Findings</h2>"
    rows = [
        (one.what, format_bytes(one.size_bytes), one.where, one.remedy) for one in report.anatomy.findings
    ]
    yield _table(("what", "bytes", "where", "what to write instead"), (1,), rows)


def _advice(report: StepReport) -> Iterator[str]:
    if not report.advised:
        return
    yield "<h2>Advice, as predicted</h2>"
    if not report.advice:
        yield '<p class="dim">No single change that the planner knows would lower the peak.</p>'
        return
    yield '<p class="dim">Each change alone, beside the run as it is.</p>'
    rows = [
        (
            one.change,
            difference(one.saved_bytes, 0),
            time_share(one.time_share),
            one.changes or "nothing",
            one.how,
        )
        for one in report.advice
    ]
    yield _table(("change", "peak", "time of a step", "changes", "how"), (1, 2), rows)


Cell = str | tuple[str, str]


def _table(
    columns: Sequence[str],
    numbers: Iterable[int],
    rows: Iterable[Sequence[Cell]],
    last: Sequence[Cell] | None = None,
    wide: Iterable[int] = (),
) -> str:
    """A table: which columns are numbers, which are left out where it is narrow; a cell may have a colour."""
    classes = dict.fromkeys(numbers, _NUMBER)
    classes |= {index: f"{classes.get(index, '')} wide".strip() for index in wide}
    head = "".join(_cell("th", name, classes.get(index, "")) for index, name in enumerate(columns))
    body = ["".join(_cells(row, classes)) for row in rows]
    lines = [f"<tr>{row}</tr>" for row in body]
    if last is not None:
        lines.append(f'<tr class="sum">{"".join(_cells(last, classes))}</tr>')
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _cells(row: Sequence[Cell], classes: dict[int, str]) -> Iterator[str]:
    for index, cell in enumerate(row):
        own = classes.get(index, "name" if index == 0 else "long")
        yield _cell("td", cell, own)


def _cell(tag: str, cell: Cell, own: str) -> str:
    text, color = cell if isinstance(cell, tuple) else (cell, "")
    swatch = f'<i class="swatch" style="background:var({color})"></i>' if color else ""
    own += " colored" if color else ""
    kind = f' class="{own}"' if own else ""
    return f"<{tag}{kind}>{swatch}{escape(text)}</{tag}>"
