"""What a run ends with: few lines that fit a terminal, with nothing lost of the peak."""

from dataclasses import replace
from io import StringIO

from rich.console import Console

from lightning_memkit.memory.anatomy import CATEGORIES, Anatomy
from lightning_memkit.memory.findings import Finding
from lightning_memkit.memory.report import Advice, PredictedStep, RunFacts, StepReport
from lightning_memkit.memory.report_table import last_screen
from tests.memory.test_report import report

__all__ = ["report"]  # the fixture

LOGITS = Finding(kind="logits_upcast", what="Logits", size_bytes=1 << 20, where="a.py:3", remedy="chunk them")
LEAK = Finding(kind="kept_tensors", what="Losses", size_bytes=4, where="a.py:9", remedy="detach()")
ADVICE = Advice(change="chunked loss", saved_bytes=2048, time_share=0.012, how="ChunkedLoss()")


def lines(report: StepReport, width: int = 80) -> list[str]:
    console = Console(file=StringIO(), width=width, soft_wrap=True)
    with console.capture() as captured:
        for what in last_screen(report):
            console.print(what, markup=False)
    return captured.get().splitlines()


def full(found: StepReport) -> StepReport:
    """As many categories as there are, each larger than anybody's card."""
    sizes = {name: (1 << 40) + index for index, name in enumerate(CATEGORIES)}
    whole = sum(sizes.values())
    anatomy: Anatomy = replace(found.anatomy, at_peak=sizes, largest=sizes, peak_bytes=whole)
    step = replace(found.step, anatomy=anatomy)
    run = RunFacts(name="M", step=1, budget_bytes=whole, micro_batch_size=1024)
    predicted = PredictedStep(peak_bytes=whole, at_peak=sizes)
    return replace(found, step=step, run=run, predicted=predicted)


def test_a_table_of_ten_lines_fits_eighty_columns(report: StepReport) -> None:
    plain = replace(full(report), advice=(), advised=False)
    said = lines(plain.with_findings(()))
    assert len(said) == 10
    table = [line for line in said if "TiB" in line and not line.startswith("Peak")]
    assert len(table) == 8
    assert max(map(len, table)) <= 80
    assert table[-1].split()[:3] == ["all", "9.00", "TiB"]


def test_the_rows_add_up_to_the_peak(report: StepReport) -> None:
    anatomy = full(report).anatomy
    rows = [line.split("  ")[0] for line in lines(full(report))[2:9]]
    assert rows[-1] == "all others"
    named = {name.replace("_", " "): size for name, size in anatomy.at_peak.items()}
    assert set(rows[:-1]) == set(sorted(named, key=lambda name: -named[name])[:6])


def test_what_helps_most_is_said_with_its_price(report: StepReport) -> None:
    plain = replace(report, advice=(), advised=False)
    assert not any(line.startswith("Next") for line in lines(plain.with_findings(())))
    assert lines(plain.with_findings((LOGITS,)))[-1] == "Next: Logits: 1.00 MiB, a.py:3; chunk them"
    advised = replace(report, advice=(ADVICE,)).with_findings((LOGITS,))
    assert lines(advised)[-1] == (
        "Next: ChunkedLoss() (chunked loss): -2.00 KiB, time of a step +1%, changes nothing"
    )
    leaking = advised.with_findings((LOGITS, LEAK))
    assert lines(leaking)[-1] == "Next: Losses: 4 B, a.py:9; detach() (1 more in the report)"
