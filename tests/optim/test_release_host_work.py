"""What a released gradient costs its host, in calls: a GPU would wait for the Python that runs for each of them."""

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from lightning_memkit.optim import native, stochastic_rounding
from lightning_memkit.optim.compensation import compensate
from lightning_memkit.optim.gradient_release import release_gradients
from lightning_memkit.optim.stochastic_rounding import StochasticRounding
from tests.testing.needs import NEEDS_COMPILER

MANY = 1 << 20


def stepping(count: int, bundle_bytes: int) -> Callable[[], None]:
    """A backward and a step of many small parameters, whose states exist."""
    parameters = [Parameter(torch.randn(16).bfloat16()) for _ in range(count)]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    compensate(optimizer)
    release_gradients(optimizer, bundle_bytes=bundle_bytes)

    def act() -> None:
        optimizer.zero_grad()
        torch.stack([parameter.sum() for parameter in parameters]).sum().backward()
        optimizer.step()

    for _ in range(3):
        act()
    return act


def python_calls(act: Callable[[], None]) -> Counter[str]:
    """Calls of Python functions, by name."""
    found: Counter[str] = Counter()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and not frame.f_code.co_name.startswith("<"):
            found[frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(before)
    return found


def more(few: int, many: int, bundle_bytes: int) -> Counter[str]:
    """The calls of `many` parameters beyond those of `few`."""
    return python_calls(stepping(many, bundle_bytes)) - python_calls(stepping(few, bundle_bytes))


@NEEDS_COMPILER
def test_a_gradient_that_waits_takes_two_calls():
    """The hook, and what it is for; the rest is done for the whole bucket, in lists."""
    found = more(10, 30, MANY)
    assert sum(found.values()) == 2 * 20, found


@NEEDS_COMPILER
def test_a_gradient_that_is_stepped_alone_needs_no_arrays_of_noise_and_no_operator_for_its_count(monkeypatch):
    rounds, added = [], []
    plain = stochastic_rounding._rounds
    monkeypatch.setattr(stochastic_rounding, "_rounds", lambda mixed: rounds.append(1) or plain(mixed))
    foreach = torch._foreach_add_
    monkeypatch.setattr(
        torch, "_foreach_add_", lambda *args, **options: added.append(1) or foreach(*args, **options)
    )
    native.available()  # builds them
    act = stepping(6, 0)
    rounds.clear()
    added.clear()
    act()
    assert rounds == added == []


@NEEDS_COMPILER
def test_the_rule_of_a_step_is_made_once_a_bucket():
    """And not once more to ask which states it has: these follow from its numbers, which are remembered."""
    assert more(10, 30, 0)["_adamw"] == 20


@pytest.mark.parametrize("count", [0, 1, 2, 7, 8, 9, 30])
def test_streams_of_few_and_of_many_are_those_of_each(count):
    rounding = StochasticRounding(seed=7)
    rounding.begin_step()
    indices = np.arange(3, 3 + count, dtype=np.uint64)
    found = rounding.streams(indices, "exp_avg")
    assert found.dtype == np.uint64
    assert found.tolist() == [rounding.stream(int(index), "exp_avg") for index in indices]
