"""Predictions within a fit work though CUDA is in use, and in a second fit, and are near what is measured.

Forks of a process predict until it has run a backward on a card; from then on copies do. Here are both.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memkit import MemoryBudget, MemoryReport
from lightning_memkit.micro_batching.sizes.sizing import Foreseen
from lightning_memkit.plugins.memory_budget import _forecast, callback
from tests.gpu.card import on_cpu, script, sized
from tests.gpu.forked import ENDED
from tests.gpu.models import Language, batches, small
from tests.gpu.runs import fit
from tests.plugins.noise import NOISE

pytestmark = [pytest.mark.gpu, *NOISE]

ROWS, LENGTH = 16, 64
# Of what the allocator reserves, by segments of 2 and 20 MiB; on the CPU bytes are counted.
NEAR = 0.1


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report is written where one stands."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def foreseen(monkeypatch: pytest.MonkeyPatch) -> list[Foreseen | None]:
    """Small models are predicted, too; what was foreseen."""
    monkeypatch.setattr(_forecast, "PAYS_FROM_PARAMETERS", 0)
    found: list[Foreseen | None] = []

    def noted(*args: Any) -> Foreseen | None:
        found.append(_forecast.foreseen(*args))
        return found[-1]

    monkeypatch.setattr(callback, "foreseen", noted)
    return found


def used(device: torch.device) -> None:
    """CUDA is initialised, and its threads of the backward run: no fork of this process can do either."""
    weight = torch.ones(8, 8, device=device, requires_grad=True)
    (weight @ weight).sum().backward()


def allocated(device: torch.device) -> int:
    """The bytes of tensors on the card; 0 on the CPU."""
    return 0 if on_cpu() else torch.cuda.memory_allocated(device)


def data(steps: int = 4) -> Any:
    return batches(steps, ROWS, sized(512, LENGTH))


def test_a_report_predicts_in_every_fit(device: torch.device) -> None:
    used(device)
    for _ in range(2):
        report = MemoryReport(live=False, watched_steps=0, predict=True)
        fit(report, module=Language(small), data=data())
        assert report.report is not None
        predicted, anatomy = report.report.predicted, report.report.anatomy
        assert predicted is not None
        assert predicted.what == ""
        assert predicted.peak_bytes == pytest.approx(anatomy.peak_bytes, rel=0.05)


def test_a_budget_predicts_in_every_fit_and_verifies_with_one_trial(
    device: torch.device, foreseen: list[Foreseen | None]
) -> None:
    used(device)
    sizes = []
    for number in range(2):
        held = allocated(device)
        budget = MemoryBudget(sized(3 << 29, 8 << 20))
        fit(budget, module=Language(small), data=data())
        assert len(foreseen) == number + 1
        last = foreseen[-1]
        assert last is not None
        assert budget.sizing is not None
        size = budget.sizing.micro_batch_size
        assert 1 <= size <= ROWS
        said = f"fit {number}, {held >> 20} MiB of tensors before it"
        assert budget.sizing.peak_bytes == pytest.approx(last.peaks[size], rel=NEAR), said
        sizes.append(size)
    assert sizes[0] == sizes[1]  # what the first fit leaves on a card counts in neither
    if not on_cpu():
        assert torch.cuda.max_memory_reserved(device) <= sized(3 << 29, 0)


@pytest.mark.parametrize("way", ["report", "budget"])
def test_a_fork_predicts_where_cuda_is_in_use_and_no_backward_has_run(way: str, tmp_path: Path) -> None:
    found = script("forked", way, str(tmp_path), XDG_CACHE_HOME=str(tmp_path))
    assert found["forks"] == [ENDED]  # else a copy has predicted, or nothing has
    assert found["what"] == ""
    assert found["predicted"] == pytest.approx(found["measured"], rel={"report": 0.05, "budget": NEAR}[way])
