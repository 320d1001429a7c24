"""Fake results that one prediction found are known to the next, and change nothing else."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_memkit import PureBF16Precision, predict_memory
from lightning_memkit.prediction import fake_results
from lightning_memkit.prediction.devices import DEVICES
from lightning_memkit.prediction.fake_results import contained_simulation
from lightning_memkit.prediction.simulation import Simulation
from tests.plugins.test_prediction import Language, batch

CARD = DEVICES["rtx4090"]


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(fake_results, "_kept", {})
    monkeypatch.setattr(fake_results, "_sent", [])


def missed(device=None, width=8) -> int:
    """How many operators had to run on fake tensors, since nothing was known of them."""

    def work() -> int:
        layer = torch.nn.Linear(width, 3)
        with Simulation(device) as simulation:
            layer(torch.empty(4, width)).square().mean().backward()
        return simulation.fakes.results.misses

    return contained_simulation(work)


@pytest.mark.parametrize("device", [None, CARD], ids=["cpu", "card"])
def test_the_second_of_two_equal_predictions_looks_nothing_up(device):
    assert missed(device) > 5
    assert missed(device) == 0
    assert missed(device, width=16) > 0  # of other shapes


def test_an_operator_that_the_fork_alone_knows_is_left_out():
    """A library of operators may be imported in the step; the other results are handed on all the same."""

    def work() -> int:
        with torch.library._scoped_library("of_the_fork", "DEF") as library:
            library.define("twice(Tensor x) -> Tensor")
            library.impl("twice", lambda x: x + x, "CompositeExplicitAutograd")
            with Simulation() as simulation:
                torch.ops.of_the_fork.twice(torch.empty(3)).add(1)
        return simulation.fakes.results.misses

    assert contained_simulation(work) > 0
    assert not hasattr(torch.ops.of_the_fork, "twice")
    assert contained_simulation(work) == 0


def test_without_a_fork_results_are_kept_too():
    for misses in (2, 0):
        with Simulation() as simulation:
            torch.empty(3).add(1)
        assert simulation.fakes.results.misses == misses


def test_other_choices_of_kernels_share_nothing():
    first = missed(CARD)
    assert missed(replace(CARD, prefers_cudnn=not CARD.prefers_cudnn)) == first
    assert missed() > 5


def test_predictions_stay_equal_to_the_byte():
    options = {"plugins": PureBF16Precision()}
    first, second = (predict_memory(Language(), batch(4, 32), trainer=options) for _ in range(2))
    assert fake_results._kept
    assert first.timeline == second.timeline
    assert first.anatomy == second.anatomy
    assert first.work == second.work


def test_torchs_own_cache_is_left_as_it_is():
    before = dict(FakeTensorMode.cache)
    missed()
    with Simulation():
        torch.empty(3).add(1)
    with pytest.raises(RuntimeError, match="size"), Simulation():
        torch.empty(3).view(2)
    assert FakeTensorMode.cache == before


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(fake_results, "_MOST", missed())
    missed(width=16)
    fake_results._read()
    (kept,) = fake_results._kept.values()
    assert len(kept) <= fake_results._MOST
    assert missed() > 0  # forgotten, found again


def test_an_error_of_the_work_is_raised_as_it_is():
    def work() -> None:
        raise ValueError("x=3 is odd")

    with pytest.raises(ValueError, match="x=3 is odd"):
        contained_simulation(work)
