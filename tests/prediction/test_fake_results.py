"""Fake results that one prediction found are known to the next, and change nothing else."""

from dataclasses import replace
from typing import Any

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


def missed(device=None, width=8) -> int:
    """How often torch did not know what a fake operator returns."""

    def work() -> int:
        before = FakeTensorMode.cache_info().misses
        layer = torch.nn.Linear(width, 3)
        with Simulation(device):
            layer(torch.empty(4, width)).square().mean().backward()
        return FakeTensorMode.cache_info().misses - before

    return contained_simulation(work)


@pytest.mark.parametrize("device", [None, CARD], ids=["cpu", "card"])
def test_the_second_of_two_equal_predictions_looks_nothing_up(device):
    assert missed(device) > 5
    assert missed(device) == 0
    assert missed(device, width=16) > 0  # of other shapes


def test_an_operator_that_the_fork_alone_knows_is_left_out():
    """A library of operators may be imported in the step; the other results are handed on all the same."""

    def work() -> int:
        before = FakeTensorMode.cache_info().misses
        with torch.library._scoped_library("of_the_fork", "DEF") as library:
            library.define("twice(Tensor x) -> Tensor")
            library.impl("twice", lambda x: x + x, "CompositeExplicitAutograd")
            with Simulation():
                torch.ops.of_the_fork.twice(torch.empty(3)).add(1)
        return FakeTensorMode.cache_info().misses - before

    assert contained_simulation(work) > 0
    assert not hasattr(torch.ops.of_the_fork, "twice")
    assert contained_simulation(work) == 0


def test_without_a_fork_torchs_operators_alone_are_kept():
    class Subgraph:
        """What torch knows by its `id`, as long as it lives."""

    key = next(iter(FakeTensorMode.cache), None) or _a_key()
    with Simulation():
        cache: Any = FakeTensorMode.cache
        cache[type(key)((Subgraph, 1))] = "of an object that may end"
        cache["a key of another torch"] = "unknown"
        torch.empty(3).add(1)
    ((kept),) = fake_results._kept.values()
    assert {key.key[0].namespace for key in kept} == {"aten"}


def _a_key():
    with FakeTensorMode():
        torch.empty(3)
    return next(iter(FakeTensorMode.cache))


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


def test_what_no_other_process_can_read_is_left_out():
    class Local:
        """Of this function alone: it can't be pickled."""

    def work() -> None:
        with Simulation():
            torch.empty(3).add(1)
        for found in fake_results._kept.values():
            found[next(iter(found))] = Local()

    contained_simulation(work)
    ((kept),) = fake_results._kept.values()
    assert kept
    assert not any(isinstance(value, Local) for value in kept.values())


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(fake_results, "_MOST", missed())
    missed(width=16)
    (kept,) = fake_results._kept.values()
    assert len(kept) <= fake_results._MOST
    assert missed() > 0  # forgotten, found again


def test_an_error_of_the_work_is_raised_as_it_is():
    def work() -> None:
        raise ValueError("x=3 is odd")

    with pytest.raises(ValueError, match="x=3 is odd"):
        contained_simulation(work)
