"""The anatomy of a step as tables."""

from collections.abc import Iterator

from rich.table import Table

from lightning_memkit.memory.anatomy import CATEGORIES
from lightning_memkit.memory.kinds import KINDS, SavedBytes, alike
from lightning_memkit.memory.report import StepReport
from lightning_memkit.memory.units import format_bytes
from lightning_memkit.memory.words import (
    OUTSIDE,
    UNMETERED,
    difference,
    flops_words,
    peak_words,
    run_words,
    share,
    signed,
    time_share,
)  # fmt: skip

_MODULES = 10  # in a table


def tables(report: StepReport) -> Iterator[Table]:
    """All tables of a report that have something to say."""
    yield category_table(report)
    if any(kind.allocated for kind in report.step.kinds.values()):
        yield kind_table(report)
    if any(one.saved_at_most for one in report.step.modules.values()):
        yield module_table(report)
    if report.advice:
        yield advice_table(report)


def category_table(report: StepReport) -> Table:
    """Each category at the peak and at its own largest, beside what was predicted."""
    anatomy, predicted = report.anatomy, report.predicted
    table = _table(_title(report), _caption(report))
    if predicted is not None and not predicted.peak_bytes:
        predicted = None  # the caption says why
    table.add_column("category")
    table.add_column("at the peak", justify="right")
    table.add_column("share", justify="right")
    table.add_column("at its largest", justify="right")
    if predicted is not None:
        table.add_column("predicted", justify="right")
    table.add_column("what it is")
    for category, meaning in CATEGORIES.items():
        foreseen = 0 if predicted is None else predicted.at_peak.get(category, 0)
        if not anatomy.largest.get(category) and not foreseen:
            continue
        size = anatomy.at_peak.get(category, 0)
        cells = [
            category.replace("_", " "),
            format_bytes(size),
            share(size, anatomy.peak_bytes),
            format_bytes(anatomy.largest.get(category, 0)),
        ]
        table.add_row(*cells, *([] if predicted is None else [format_bytes(foreseen)]), meaning)
    fixed = "context, other processes and the process itself: outside the budget"
    size = format_bytes(anatomy.fixed_bytes)
    table.add_row("fixed cost", size, "", size, *([] if predicted is None else [""]), fixed)
    return table


def kind_table(report: StepReport) -> Table:
    """What each kind of operator has saved and made."""
    table = _table("By kind of operator", "")
    table.add_column("kind")
    table.add_column("saved at the peak", justify="right")
    table.add_column("saved at most", justify="right")
    table.add_column("allocated in the step", justify="right")
    table.add_column("what it is")
    for kind, found in report.step.kinds.items():
        sizes = (found.saved_at_peak, found.saved_at_most, found.allocated)
        table.add_row(kind, *map(format_bytes, sizes), KINDS.get(kind, ""))
    return table


def module_table(report: StepReport, most: int = _MODULES) -> Table:
    """The modules that saved most."""
    groups = alike({name: one for name, one in report.step.modules.items() if one.saved_at_most})
    rest = len(groups) - most
    table = _table("Modules that saved most", f"{rest} more in the JSON" if rest > 0 else "")
    table.add_column("module")
    for name in ("how many", "saved at most", "share", "saved at the peak"):
        table.add_column(name, justify="right")
    total = max(1, report.anatomy.largest.get("saved_activations", 0))
    for name, (count, found) in list(groups.items())[:most]:
        sizes = format_bytes(found.saved_at_most), share(found.saved_at_most, total)
        table.add_row(name or OUTSIDE, str(count), *sizes, format_bytes(found.saved_at_peak))
    return table


def advice_table(report: StepReport) -> Table:
    """What would save how much for how much time."""
    table = _table("Advice, as predicted", "each change alone, beside the run as it is; bytes of the peak")
    for name in ("change", "peak", "time of a step", "changes", "how"):
        is_number = name in ("peak", "time of a step")
        table.add_column(name, justify="right" if is_number else "left", overflow="fold")
    for one in report.advice:
        table.add_row(
            one.change,
            signed(-one.saved_bytes),
            time_share(one.time_share),
            one.changes or "nothing",
            one.how,
        )
    return table


def _title(report: StepReport) -> str:
    anatomy, run = report.anatomy, report.run
    if report.failure:
        where = f" in the {anatomy.peak_phase}" if report.metered else ""
        title = f"Out of memory{where}, with {format_bytes(anatomy.peak_bytes)} alive"
    else:
        title = f"Peak {format_bytes(anatomy.peak_bytes)} in the {anatomy.peak_phase}"
    if report.predicted is not None and report.predicted.peak_bytes:
        title += f", predicted {format_bytes(report.predicted.peak_bytes)}"
    elif run.forecast_bytes:
        title += f", MemoryBudget's forecast {format_bytes(run.forecast_bytes)}"
    if run.budget_bytes:
        title += f", budget {format_bytes(run.budget_bytes)}"
    if run.micro_batch_size:
        title += f", micro-batch {run.micro_batch_size}"
    return title


def _caption(report: StepReport) -> str:
    if not report.metered:
        return UNMETERED
    what = "failed" if report.failure else "peak"
    metered = (
        f"{what} at {peak_words(report)}; one step of {report.anatomy.operators:,} operators was metered"
    )
    why = "" if report.predicted is None or not report.predicted.what else f"; {report.predicted.what}"
    return metered + why


def _table(title: str, caption: str) -> Table:
    return Table(title=title, title_justify="left", caption=caption or None, caption_justify="left")


def comparison_tables(one: StepReport, other: StepReport, names: tuple[str, str]) -> Iterator[Table]:
    """Two reports side by side, with what the second has more."""
    pairs = [
        (
            category.replace("_", " "),
            one.anatomy.at_peak.get(category, 0),
            other.anatomy.at_peak.get(category, 0),
        )
        for category in CATEGORIES
    ]
    peaks = one.anatomy.peak_bytes, other.anatomy.peak_bytes
    yield _beside("At the peak, by category", names, [*pairs, ("peak", *peaks)])
    kinds = [
        (
            kind,
            one.step.kinds.get(kind, SavedBytes()).saved_at_most,
            other.step.kinds.get(kind, SavedBytes()).saved_at_most,
        )
        for kind in KINDS
    ]
    yield _beside("Saved for the backward at most, by kind of operator", names, kinds)
    table = _table("The peak", "")
    for name in ("", *names):
        table.add_column(name, overflow="fold")
    reports = (one, other)
    table.add_row("at", *(f"{report.anatomy.peak_phase}, {peak_words(report)}" for report in reports))
    table.add_row("run", *(run_words(report) for report in reports))
    if all(report.flops.units for report in reports):
        each = (flops_words(report.flops.model / report.flops.units) for report in reports)
        table.add_row("operations a token, or sample", *each)
    yield table


def _beside(title: str, names: tuple[str, str], rows: list[tuple[str, int, int]]) -> Table:
    table = _table(title, "")
    table.add_column("")
    for name in (*names, "difference"):
        table.add_column(name, justify="right", overflow="fold")
    for name, before, after in rows:
        if before or after:
            table.add_row(name, format_bytes(before), format_bytes(after), difference(before, after))
    return table
