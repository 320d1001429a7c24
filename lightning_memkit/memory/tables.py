"""A report's tables, for the terminal and the page alike."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_memkit.memory.anatomy import CATEGORIES
from lightning_memkit.memory.chart import STACK
from lightning_memkit.memory.kinds import KINDS, SavedBytes, alike
from lightning_memkit.memory.report import StepReport
from lightning_memkit.memory.units import format_bytes
from lightning_memkit.memory.words import (
    OUTSIDE,
    difference,
    flops_words,
    peak_words,
    run_words,
    share,
    time_share,
)  # fmt: skip

_MODULES = 20  # the most rows of the table of modules
_LARGEST = 6  # categories in the short table
_NONE_BETTER = "No single change that the planner knows would lower the peak."


@dataclass(frozen=True)
class ReportTable:
    """One table; `note` is printed below it, and `total` is its last row.

    Args:
        title: printed above it.
        columns: their names.
        classes: the columns' CSS classes in the page: "n" for numbers, "wide" for those hidden on a narrow
            screen.
        rows: their cells; without any, only the note is shown.
        by_category: whether each row is a category, shown with its colour.
    """

    title: str
    columns: Sequence[str]
    classes: Sequence[str]
    rows: Sequence[Sequence[str]]
    total: Sequence[str] = ()
    note: str = ""
    by_category: bool = False


def tables(report: StepReport) -> Iterator[ReportTable]:
    """All non-empty tables of a report, except the `finding_table`."""
    yield category_table(report)
    if any(kind.allocated for kind in report.step.kinds.values()):
        yield kind_table(report)
    if any(one.saved_at_most for one in report.step.modules.values()):
        yield module_table(report)
    if report.advised or report.advice:
        yield advice_table(report)


def category_table(report: StepReport) -> ReportTable:
    """Each category at the peak and at its own peak, beside the prediction."""
    anatomy, predicted = report.anatomy, report.predicted
    columns = ["category", "then" if report.failure else "at the peak", "share", "at its largest"]
    classes, total = ["", "n", "n", "n"], ["all", format_bytes(anatomy.peak_bytes), "", ""]
    note = (
        f"Fixed cost beside the tensors: {format_bytes(anatomy.fixed_bytes)} (context, other processes, the "
    )
    note += "process itself), outside the budget."
    note += f" {predicted.what}." if predicted is not None and predicted.what else ""
    if predicted is not None and not predicted.peak_bytes:
        predicted = None  # the note says why
    if predicted is not None:
        columns += ["predicted", "difference"]
        classes[-1:] = ["n wide", "n", "n"]
        total += [format_bytes(predicted.peak_bytes), difference(predicted.peak_bytes, anatomy.peak_bytes)]
    rows = []
    for name in sorted(CATEGORIES, key=STACK.index):
        size, largest = anatomy.at_peak.get(name, 0), anatomy.largest.get(name, 0)
        foreseen = 0 if predicted is None else predicted.at_peak.get(name, 0)
        if size or largest or foreseen:
            cells = [format_bytes(size), share(size, anatomy.peak_bytes), format_bytes(largest)]
            cells += [] if predicted is None else [format_bytes(foreseen), difference(foreseen, size)]
            rows.append([_spelt(name), *cells, CATEGORIES[name]])
    columns, classes, total = [*columns, "what it is"], [*classes, "wide"], [*total, ""]
    return ReportTable("By category", columns, classes, rows, total, note, by_category=True)


def short_table(report: StepReport) -> ReportTable:
    """The largest categories at the peak, and the others in one row."""
    anatomy, predicted = report.anatomy, report.predicted
    foreseen = {} if predicted is None or not predicted.peak_bytes else predicted.at_peak
    names = sorted(CATEGORIES, key=lambda name: -anatomy.at_peak.get(name, 0))
    groups = [(_spelt(name), [name]) for name in names[:_LARGEST]] + [("all others", names[_LARGEST:])]
    rows = []
    for title, members in groups:
        size, expected = (sum(of.get(name, 0) for name in members) for of in (anatomy.at_peak, foreseen))
        if size or expected:
            cells = [title, format_bytes(size), share(size, anatomy.peak_bytes)]
            rows.append([*cells, format_bytes(expected)] if foreseen else cells)
    total = ["all", format_bytes(anatomy.peak_bytes), ""]
    columns, classes = ["category", "at the peak", "share"], ["", "n", "n"]
    if foreseen:
        columns, classes = [*columns, "predicted"], [*classes, "n"]
        total += [format_bytes(sum(foreseen.values()))]
    return ReportTable("At the peak", columns, classes, rows, total, by_category=True)


def kind_table(report: StepReport) -> ReportTable:
    """Saved and allocated bytes of each kind of operator."""
    columns = ("kind", _saved_then(report), "saved at most", "allocated in the step", "what it is")
    rows = [
        (name, *map(format_bytes, (one.saved_at_peak, one.saved_at_most, one.allocated)), KINDS.get(name, ""))
        for name, one in report.step.kinds.items()
        if one.allocated
    ]
    return ReportTable("By kind of operator", columns, ("", "n", "n", "n", "wide"), rows)


def module_table(report: StepReport) -> ReportTable:
    """The modules that saved most."""
    modules = {name: one for name, one in report.step.modules.items() if one.saved_at_most}
    whole, groups = sum(one.saved_at_most for one in modules.values()), alike(modules)
    rest = len(groups) - _MODULES
    rows = [
        (name or OUTSIDE, str(count), format_bytes(most), share(most, whole), format_bytes(one.saved_at_peak))
        for name, (count, one) in list(groups.items())[:_MODULES]
        for most in [one.saved_at_most]
    ]
    columns = ("module", "how many", "saved at most", "share", _saved_then(report))
    note = f"{rest} more are in the JSON, each module by itself." if rest > 0 else ""
    title = "Modules that saved most for the backward"
    return ReportTable(title, columns, ("", "n", "n", "n", "n wide"), rows, note=note)


def finding_table(report: StepReport) -> ReportTable:
    """The wasteful things, and what to write instead."""
    found = report.anatomy.findings
    rows = [(one.what, format_bytes(one.size_bytes), one.where, one.remedy) for one in found]
    return ReportTable(
        "Findings", ("what", "bytes", "where", "what to write instead"), ("", "n", "", ""), rows
    )


def advice_table(report: StepReport) -> ReportTable:
    """How much memory each change would save, and how much time it would take."""
    columns = ("change", "peak", "time of a step", "changes", "how")
    rows = [
        (one.change, difference(one.saved_bytes, 0), time_share(one.time_share), one.changes or "nothing", one.how)
        for one in report.advice
    ]  # fmt: skip
    note = "Each change alone, beside the run as it is." if rows else _NONE_BETTER
    return ReportTable("Advice, as predicted", columns, ("", "n", "n", "", ""), rows, note=note)


def comparison_tables(one: StepReport, other: StepReport, names: tuple[str, str]) -> Iterator[ReportTable]:
    """Two reports side by side, with their differences."""
    both = (one, other)
    sizes = {_spelt(name): [own.anatomy.at_peak.get(name, 0) for own in both] for name in CATEGORIES}
    peaks = [own.anatomy.peak_bytes for own in both]
    yield _beside("At the peak, by category", ("category", *names), sizes, peaks)
    sizes = {kind: [own.step.kinds.get(kind, SavedBytes()).saved_at_most for own in both] for kind in KINDS}
    yield _beside("Saved for the backward at most, by kind of operator", ("kind", *names), sizes)
    rows = [
        ("at", *(f"{own.anatomy.peak_phase}, {peak_words(own)}" for own in both)),
        ("run", *map(run_words, both)),
    ]
    if all(own.flops.units for own in both):
        each = (flops_words(own.flops.model / own.flops.units) for own in both)
        rows.append(("operations a token, or sample", *each))
    yield ReportTable("The peak", ("", *names), ("", "", ""), rows)


def _beside(
    title: str, columns: Sequence[str], sizes: dict[str, list[int]], peaks: Sequence[int] = ()
) -> ReportTable:
    def row(name: str, before: int, after: int) -> tuple[str, ...]:
        return name, format_bytes(before), format_bytes(after), difference(before, after)

    rows = [row(name, *pair) for name, pair in sizes.items() if any(pair)]
    total = row("peak", *peaks) if peaks else ()
    return ReportTable(
        title, (*columns, "difference"), ("", "n", "n", "n"), rows, total, by_category=bool(peaks)
    )


def _saved_then(report: StepReport) -> str:
    return "saved then" if report.failure else "saved at the peak"


def _spelt(name: str) -> str:
    return name.replace("_", " ")
