"""What a run ends with: few lines that fit a terminal, with nothing lost of the peak."""

from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from lightning_memkit.memory.anatomy import CATEGORIES, Anatomy
from lightning_memkit.memory.findings import Finding
from lightning_memkit.memory.likely_change import likely_change
from lightning_memkit.memory.report import Advice, PredictedStep, RunFacts, StepReport
from lightning_memkit.memory.report_table import last_screen
from tests.memory.test_report import report

__all__ = ["report"]  # the fixture

LOGITS = Finding(kind="logits_upcast", what="Logits", size_bytes=1 << 20, where="a.py:3", remedy="chunk them")
LEAK = Finding(kind="kept_tensors", what="Losses", size_bytes=4, where="a.py:9", remedy="detach()")
ACTIVATIONS, STATES = {"saved_activations": 800}, {"optimizer_states": 600, "gradients": 300}
GPU = {"precision": "bf16-true", "device": "NVIDIA H200"}
DENSE = {"precision": "bf16-true", "recomputes": True, "micro_batch_size": 8}
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
    assert len(said) == 11
    assert said[-1].startswith("Next: ")
    assert len(said[-1]) <= 80
    table = [line for line in said if "TiB" in line and not line.startswith(("Peak", "Next"))]
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
    assert lines(plain.with_findings((LOGITS,)))[-1] == "Next: Logits: 1.00 MiB, a.py:3; chunk them"
    advised = replace(report, advice=(ADVICE,)).with_findings((LOGITS,))
    assert lines(advised)[-1] == (
        "Next: ChunkedLoss() (chunked loss): -2.00 KiB, time of a step +1%, changes nothing"
    )
    leaking = advised.with_findings((LOGITS, LEAK))
    assert lines(leaking)[-1] == "Next: Losses: 4 B, a.py:9; detach() (1 more in the report)"


@pytest.mark.parametrize(
    ("run", "at_peak", "words"),
    [
        ({}, ACTIVATIONS, "ActivationCheckpointing(): up to -800 B, for a second forward"),
        ({}, STATES, "PureBF16Precision(): up to -450 B, for bfloat16's rounding"),
        (GPU, STATES, "OptimizerOffload(): up to -600 B, for copies at every step"),
        ({"precision": "bf16-true"}, STATES, ""),
        ({**GPU, "offloads": True}, STATES, ""),
        (
            DENSE,
            ACTIVATIONS | {"temporaries": 100},
            "MemoryBudget(micro_batch_size=4): up to -450 B, for smaller kernels",
        ),
        ({**DENSE, "micro_batch_size": 1}, ACTIVATIONS, ""),
        ({"precision": "bf16-true"}, {"saved_activations": 49, "weights": 951}, ""),
    ],
)
def test_without_a_prediction_the_category_that_takes_most_says_what_may_help(
    report: StepReport, run: dict[str, Any], at_peak: dict[str, int], words: str
) -> None:
    anatomy = replace(report.anatomy, at_peak=at_peak, peak_bytes=1000, findings=())
    facts = RunFacts(**{"precision": "32-true", "device": "cpu", **run})
    found = replace(report, step=replace(report.step, anatomy=anatomy), run=facts, advice=(), advised=False)
    found = replace(found, flops=replace(found.flops, samples=0))
    assert likely_change(found) == words
    assert [line for line in lines(found) if line.startswith("Next")] == ([f"Next: {words}"] if words else [])


def test_a_model_without_repeated_blocks_is_not_told_to_checkpoint_them(report: StepReport) -> None:
    anatomy = replace(report.anatomy, at_peak={"saved_activations": 900}, peak_bytes=1000, findings=())
    step = replace(report.step, anatomy=anatomy, modules={"head": report.step.modules["head"]})
    assert "Checkpointing" not in likely_change(replace(report, step=step))
