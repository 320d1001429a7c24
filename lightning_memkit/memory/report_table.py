"""A report's tables in a terminal."""

from collections.abc import Iterator

import rich.table

from lightning_memkit.memory import tables as of_memory
from lightning_memkit.memory.report import StepReport
from lightning_memkit.memory.units import format_bytes
from lightning_memkit.memory.words import UNMETERED, peak_words


def tables(report: StepReport) -> Iterator[rich.table.Table]:
    """All non-empty tables of a report; the title of the first gives the peak."""
    first, *others = of_memory.tables(report)
    yield _drawn(first, title=_title(report), caption=f"{first.note}\n{_caption(report)}")
    yield from map(_drawn, others)


def comparison_tables(
    one: StepReport, other: StepReport, names: tuple[str, str]
) -> Iterator[rich.table.Table]:
    """Two reports side by side, with their differences."""
    yield from map(_drawn, of_memory.comparison_tables(one, other, names))


def _drawn(
    table: of_memory.ReportTable, title: str | None = None, caption: str | None = None
) -> rich.table.Table:
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
