"""The part of the exactness benchmark that runs on two ranks."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from benchmarks import _exactness_ranks
from benchmarks._exactness_generator import cases_of
from benchmarks._exactness_ranks import (
    AVERAGED,
    DIFFERENT,
    JOINED,
    REFUSED,
    WARNED,
    Compared,
    Found,
    figures_on_ranks,
    judged_on_ranks,
    outcome_of,
)
from lightning_memkit.micro_batching import split_batch
from tests.processes import run_on_ranks

CASES = {case.name: case for case in cases_of(1)}


def gradient(module: Any, batch: Any) -> list[torch.Tensor]:
    return list(torch.autograd.grad(module.training_step(batch, 0), list(module.parameters())))


@pytest.mark.parametrize(
    ("scale", "of_halves", "outcome"),
    [(1.0, False, JOINED), (1.0, True, AVERAGED), (1.001, False, DIFFERENT), (1.001, True, DIFFERENT)],
)
def test_a_gradient_is_told_by_its_oracles(scale: float, of_halves: bool, outcome: str) -> None:
    compared = Compared(CASES["by_positives"], 3)
    torch.manual_seed(3)
    module: Any = CASES["by_positives"].module().double()
    module.log = lambda *args, **options: None
    batch = {
        name: value.double() if value.is_floating_point() else value
        for name, value in compared.batches[0].items()
    }
    halves = [gradient(module, half) for half in split_batch(batch, [4, 4])]
    joined = gradient(module, batch)
    averaged = [(one + other) / 2 for one, other in zip(*halves, strict=True)]
    for parameter, grad in zip(module.parameters(), averaged if of_halves else joined, strict=True):
        parameter.grad = scale * grad
    compared.on_train_batch_start(cast(Any, None), module, batch, 0)
    compared.on_before_optimizer_step(cast(Any, None), module, cast(Any, None))
    told = (None, compared.averaged, compared.different, compared.untold, False)
    assert outcome_of(Found(name="by_positives", size=1), [told, told]).outcome == outcome


def test_what_one_rank_alone_refuses_is_different_and_what_was_warned_of_is_not() -> None:
    found = Found(name="step", size=1)
    fine, refusal, crash = (
        (None, 0, "", False, False),
        (("BudgetError", True), 0, "", False, False),
        ("E", False),
    )
    assert outcome_of(found, [refusal, refusal]).outcome == REFUSED
    assert outcome_of(found, [refusal, fine]).outcome == DIFFERENT
    assert outcome_of(found, [(crash, 0, "", False, False)] * 2).outcome == DIFFERENT
    assert outcome_of(found, [(None, 0, "off", False, True), fine]).outcome == WARNED
    assert outcome_of(found, [(None, 0, "", True, False), fine]).outcome == ""


def test_two_ranks_train_on_the_joined_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum over rows trains on the ranks' mean, as without memkit; steps that rows act in are not judged."""

    def launched(module: str, arguments: str, results: Path) -> bool:
        """What the benchmark's launcher does, without its imports and its watch."""
        done = run_on_ranks(module, arguments)
        assert done.returncode == 0, done.stderr[-3000:]
        return False

    monkeypatch.setattr(_exactness_ranks, "watched", launched)
    found = judged_on_ranks(1, ["by_positives", "sum", "contrastive"])
    assert {one.name: one.outcome for one in found} == {"by_positives": JOINED, "sum": AVERAGED}
    assert figures_on_ranks(found) == {
        "ranks_cells": 4, "ranks_joined": 2, "ranks_averaged": 2, "ranks_warned": 0, "ranks_refused": 0,
        "ranks_different": 0,
    }  # fmt: skip
