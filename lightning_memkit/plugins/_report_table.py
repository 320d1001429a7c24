"""The anatomy of a step as a table."""

from rich.table import Table

from lightning_memkit.memory.anatomy import CATEGORIES, Anatomy
from lightning_memkit.memory.units import format_bytes
from lightning_memkit.plugins.memory_budget import MemoryBudget


def anatomy_table(anatomy: Anatomy, budget: MemoryBudget | None = None) -> Table:
    """The anatomy as a table: each category at the peak, and at its own largest."""
    title = f"Peak {format_bytes(anatomy.peak_bytes)} in the {anatomy.peak_phase}"
    if budget is not None:
        title += f", budget {format_bytes(budget.budget_bytes)}"
        if budget.sizing is not None:
            title += f", micro-batch {budget.sizing.micro_batch_size}"
    table = Table(title=title, title_justify="left", caption=_caption(anatomy), caption_justify="left")
    table.add_column("category")
    table.add_column("at the peak", justify="right")
    table.add_column("share", justify="right")
    table.add_column("at its largest", justify="right")
    table.add_column("what it is")
    for category, meaning in CATEGORIES.items():
        if not anatomy.largest.get(category):
            continue
        table.add_row(
            category.replace("_", " "),
            format_bytes(anatomy.at_peak[category]),
            f"{anatomy.at_peak[category] / max(1, anatomy.peak_bytes):.1%}",
            format_bytes(anatomy.largest[category]),
            meaning,
        )
    fixed = "context, other processes and the process itself: outside the budget"
    table.add_row(
        "fixed cost", format_bytes(anatomy.fixed_bytes), "", format_bytes(anatomy.fixed_bytes), fixed
    )
    return table


def _caption(anatomy: Anatomy) -> str:
    return f"peak at {anatomy.peak_operator}; one step of {anatomy.operators:,} operators was metered"
