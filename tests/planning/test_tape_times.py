"""What tapes cost the host counts in plans, also where it can't be measured in a fork."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_memkit.memory.clocks import Took
from lightning_memkit.planning import tape_times
from lightning_memkit.planning.choices import Family, checkpointings, precisions
from lightning_memkit.planning.search import search
from lightning_memkit.planning.tape_times import ASSUMED, tape_seconds
from lightning_memkit.planning.times import TimesHere
from lightning_memkit.prediction.contained import NO_AUTOGRAD_IN_FORKS
from lightning_memkit.prediction.result import Prediction
from lightning_memkit.prediction.work import MADE_AGAIN, RECORDED, OperatorWork
from lightning_memkit.utilities.errors import PredictionError
from tests.planning.test_search import Formula, all_families, problem
from tests.testing.needs import NEEDS_COMPILER

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Nothing has been measured in this process."""
    found: dict[str, float] = {}
    monkeypatch.setattr(tape_times, "_measured", found)
    return found


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes each measurement, which takes a known time."""
    runs: list[str] = []
    monkeypatch.setattr(
        tape_times, "_tape_seconds", lambda: runs.append("measured") or {RECORDED: 3e-5, MADE_AGAIN: 2e-5}
    )
    return runs


def failing(error: Exception) -> Callable[..., Any]:
    def fork(work: Callable[[], Any]) -> Any:
        raise error

    return fork


def no_autograd() -> RuntimeError:
    return RuntimeError(f"Unable to handle {NO_AUTOGRAD_IN_FORKS}-based multiprocessing.")


@pytest.mark.parametrize("error", [no_autograd(), AttributeError("module 'os' has no attribute 'fork'")])
def test_where_no_fork_runs_autograd_tapes_are_measured_here_once(monkeypatch, ran, error):
    monkeypatch.setattr(tape_times, "contained", failing(error))
    assert tape_seconds() == tape_seconds() == {RECORDED: 3e-5, MADE_AGAIN: 2e-5}
    assert ran == ["measured"]


@pytest.mark.parametrize(
    "error", [PredictionError("The fork was killed."), RuntimeError("no memory for a fork")]
)
def test_where_nothing_can_be_measured_the_constants_count_until_something_is(monkeypatch, ran, error):
    monkeypatch.setattr(tape_times, "contained", failing(error))
    assert tape_seconds() == ASSUMED
    assert min(ASSUMED.values()) > 1e-5
    assert not ran
    monkeypatch.setattr(tape_times, "contained", lambda work: work())
    assert tape_seconds() == {RECORDED: 3e-5, MADE_AGAIN: 2e-5}


def test_what_an_earlier_fit_measured_counts_after_forks_have_ended(monkeypatch, ran):
    monkeypatch.setattr(tape_times, "contained", lambda work: work())
    earlier = dict(tape_seconds())
    monkeypatch.setattr(tape_times, "contained", failing(PredictionError("The fork was killed.")))
    assert tape_seconds() == earlier
    assert ran == ["measured"]


@NEEDS_COMPILER
@pytest.mark.long
def test_beside_an_accelerator_that_has_run_a_backward_a_tape_is_not_free():
    """In a process of its own: the forks of this one would end, too."""
    code = """
import torch
from lightning_memkit.planning import tape_times
from lightning_memkit.planning.times import TimesHere
from lightning_memkit.prediction.work import MADE_AGAIN, RECORDED, OperatorWork
from tests.testing.fake_device import fake_device

here = []
plain = tape_times._tape_seconds
tape_times._tape_seconds = lambda: here.append(1) or plain()
with fake_device() as device:
    torch.ones(2, device=device.torch_device, requires_grad=True).sum().backward()
    before = torch.get_rng_state()
    times = TimesHere(device.torch_device.type)
    for name in (RECORDED, MADE_AGAIN):
        operator = OperatorWork(name, (), (), 0, 0, is_16_bit=False)
        assert times.host_seconds(operator) > 0
        assert times.seconds(operator) == 0
    assert here == [1]
    assert torch.equal(torch.get_rng_state(), before)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


class Taped(Formula):
    """Selective checkpointing computes less again than "full", and records its operators."""

    def __call__(self, family: Family, rows: int) -> Prediction:
        found = super().__call__(family, rows)
        if family["checkpointing"].name == "selective":
            recorded = OperatorWork(RECORDED, (), (), 0, 0, is_16_bit=False)
            found.work.part[recorded] = 300.0
        return found


class OnACard(TimesHere):
    """Of which each byte takes a microsecond; Python's part is asked for as on any card."""

    def __init__(self, byte: float) -> None:
        super().__init__("cuda")
        self.byte = byte

    def _measured(self, operator: OperatorWork) -> Took:
        return (
            super()._measured(operator) if operator.is_python else Took(operator.moved_bytes * self.byte, 0.0)
        )


@pytest.mark.parametrize(("byte", "chosen"), [(1e-3, "selective"), (1e-6, "every:2")])
@pytest.mark.parametrize("error", [no_autograd(), PredictionError("The fork was killed.")])
def test_a_recorded_configuration_that_the_host_bounds_is_not_chosen(monkeypatch, ran, byte, chosen, error):
    """Rows that compute next to nothing, and as many recorded operators: the device waits for its host."""
    monkeypatch.setattr(tape_times, "contained", failing(error))
    checkpointed = tuple(choice for choice in checkpointings() if choice.name != "none")
    given = all_families(precision=precisions(None)[:1], checkpointing=checkpointed)
    asked = replace(problem(Taped(), 1000 + 32 * 60), times=OnACard(byte))
    rows, _ = search(given, asked)
    assert rows[0].family["checkpointing"].name == chosen
    assert rows[0].fits
