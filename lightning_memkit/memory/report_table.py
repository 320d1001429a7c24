"""A report's tables in a terminal."""

from collections.abc import Iterator

import rich.table

from lightning_memkit.memory import tables as of_memory
from lightning_memkit.memory.likely_change import likely_change
from lightning_memkit.memory.report import StepReport
from lightning_memkit.memory.units import format_bytes
from lightning_memkit.memory.words import UNMETERED, difference, peak_words, time_share


def tables(report: StepReport) -> Iterator[rich.table.Table]:
    """All non-empty tables of a report; the title of the first gives the peak."""
    first, *others = of_memory.tables(report)
    yield _drawn(first, title=_title(report), caption=f"{first.note}\n{_caption(report)}")
    yield from map(_drawn, others)


def last_screen(report: StepReport) -> Iterator[rich.table.Table | str]:
    """What a run ends with, in ten lines: its peak, the largest categories, and the change that helps most."""
    yield _title(report)
    yield _drawn(of_memory.short_table(report), is_plain=True)
    if report.predicted is not None and report.predicted.what:
        yield f"{report.predicted.what}."
    if advice := _first_advice(report):
        yield f"Next: {advice}"


def comparison_tables(
    one: StepReport, other: StepReport, names: tuple[str, str]
) -> Iterator[rich.table.Table]:
    """Two reports side by side, with their differences."""
    yield from map(_drawn, of_memory.comparison_tables(one, other, names))


def _first_advice(report: StepReport) -> str:
    """A leak, which grows; else the best predicted change; else the most wasteful thing; else what may save most."""
    findings = sorted(report.anatomy.findings, key=lambda one: (one.kind == "kept_tensors", one.size_bytes))
    if report.advice and not (findings and findings[-1].kind == "kept_tensors"):
        one = report.advice[0]
        price = f"{difference(one.saved_bytes, 0)}, time of a step {time_share(one.time_share)}"
        return f"{one.how} ({one.change}): {price}, changes {one.changes or 'nothing'}"
    more = f" ({len(findings) - 1} more in the report)" if len(findings) > 1 else ""
    return f"{findings[-1]}{more}" if findings else likely_change(report)


def _drawn(
    table: of_memory.ReportTable,
    title: str | None = None,
    caption: str | None = None,
    *,
    is_plain: bool = False,
) -> rich.table.Table:
    if is_plain:
        drawn = rich.table.Table(box=None, pad_edge=False)
    else:
        drawn = rich.table.Table(
            title=title or table.title,
            title_justify="left",
            caption=caption or table.note or None,
            caption_justify="left",
        )
    for name, own in zip(table.columns, table.classes, strict=True):
        drawn.add_column(name, justify="right" if own.startswith("n") else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*row)
    if table.total:
        drawn.add_row(*table.total)
    return drawn


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
    return f"{what} at {peak_words(report)}; one step of {report.anatomy.operators:,} operators was metered"
