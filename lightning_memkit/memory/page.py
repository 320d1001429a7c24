"""A report as one self-contained HTML file: no network, no library."""

from collections.abc import Iterator

from jinja2 import Environment, PackageLoader, StrictUndefined

import lightning_memkit
from lightning_memkit.memory.chart import chart, height_of
from lightning_memkit.memory.report import StepReport
from lightning_memkit.memory.tables import comparison_tables, finding_table, tables
from lightning_memkit.memory.units import format_bytes
from lightning_memkit.memory.words import UNMETERED, flops_words, run_words


def page(report: StepReport) -> str:
    """The page of one report."""
    title = f"{report.run.name or 'A model'}: memory of a training step"
    shown = list(tables(report))
    if report.anatomy.findings:
        at = len(shown) - (report.advised or bool(report.advice))  # before the advice
        shown.insert(at, finding_table(report))
    return _rendered(
        title=title, report=report, facts=list(_facts(report)), chart=chart(report), tables=shown
    )


def comparison_page(one: StepReport, other: StepReport, names: tuple[str, str]) -> str:
    """The page of two reports side by side: timelines on one scale, and the differences."""
    top = max(height_of(one), height_of(other))
    charts = [chart(report, number, top) for number, report in enumerate((one, other))]
    return _rendered(
        title=f"{names[0]} and {names[1]}: memory of a training step",
        runs=list(zip(names, (one, other), charts, strict=True)),
        tables=list(comparison_tables(one, other, names)),
    )


def _rendered(**what: object) -> str:
    """Render the template; the values are escaped, so they can't inject tags."""
    templates = Environment(
        loader=PackageLoader("lightning_memkit", "memory"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    # Without jinja's default of sorted keys: the chart stacks categories in their order.
    templates.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    templates.filters |= {"bytes": format_bytes, "run_words": run_words}
    template = templates.get_template("page.html")
    return template.render(version=lightning_memkit.__version__, unmetered=UNMETERED, **what)


def _facts(report: StepReport) -> Iterator[tuple[str, str]]:
    run, rates, flops = report.run, report.rates, report.flops
    predicted = 0 if report.predicted is None else report.predicted.peak_bytes
    yield "alive then" if report.failure else "peak", format_bytes(report.anatomy.peak_bytes)
    sizes = {
        "budget": run.budget_bytes,
        "predicted": predicted,
        "MemoryBudget's forecast": run.forecast_bytes,
    }
    yield from ((name, format_bytes(size)) for name, size in sizes.items() if size)
    for name in ("tokens", "samples"):
        if f"{name}_per_second" in rates:
            yield f"{name} a second", f"{rates[f'{name}_per_second']:,.0f}"
    if "mfu" in rates:
        yield "MFU", f"{rates['mfu']:.1%}"
    if flops.units:
        unit = "token" if flops.tokens else "sample"
        yield f"operations a {unit}", flops_words(flops.model / flops.units)
    if run.retries:
        yield "retries", str(run.retries)
