"""torch's snapshots of CUDA's allocator, beside a report and beside that of a failed step: written, and read again."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_memkit import MemoryReport
from tests.gpu.card import needs_cuda, on_cpu, sized
from tests.gpu.models import Language, batches, small
from tests.gpu.runs import fit
from tests.plugins.noise import NOISE

pytestmark = [pytest.mark.gpu, *NOISE]
ROWS, LENGTH = 8, 64
METERED, FAILED = Path("memory_report_snapshot.pickle"), Path("memory_report_oom_snapshot.pickle")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report is written where one stands."""
    monkeypatch.chdir(tmp_path)


def read(path: Path) -> tuple[list[Any], list[Any]]:
    """Segments, and what the first device's allocator did meanwhile."""
    snapshot = pickle.loads(path.read_bytes())
    return snapshot["segments"], snapshot["device_traces"][0]


def files_of(trace: list[Any]) -> set[str]:
    """The files in which what allocated stands."""
    return {frame["filename"] for entry in trace for frame in entry.get("frames", ())}


def test_the_metered_step_s_is_written_with_python_s_stacks_alone(device: torch.device) -> None:
    """Those need no symbols of libraries to be looked up, which takes minutes for a step's allocations."""
    report = MemoryReport(live=False, watched_steps=0, predict=False)
    fit(report, module=Language(small), data=batches(4, ROWS, sized(512, LENGTH)))
    assert report.report is not None
    assert METERED.exists() is (device.type == "cuda")
    needs_cuda("torch has snapshots of its allocator alone")
    segments, trace = read(METERED)
    weights = report.report.anatomy.at_peak["weights"]
    assert sum(segment["allocated_size"] for segment in segments) >= weights
    taken = [entry["size"] for entry in trace if entry["action"] == "alloc"]
    assert sum(taken) >= report.report.anatomy.at_peak["saved_activations"] > 0
    assert {"alloc", "free_completed"} <= {entry["action"] for entry in trace}
    files = files_of(trace)
    assert any(Path(name).parts[-3:] == ("tests", "gpu", "models.py") for name in files)
    assert not [name for name in files if name.endswith((".cpp", ".cu", ".so", ".h"))]
    assert not torch._C._cuda_isHistoryEnabled()


class Spilling(Language):
    """Asks for more than there is in the first step."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if on_cpu():
            raise torch.OutOfMemoryError("as a card says it")
        torch.empty(1 << 50, dtype=torch.uint8, device=self.device)
        return loss


def test_a_failed_step_s_is_written_too(device: torch.device) -> None:
    report = MemoryReport(live=False, watched_steps=0, predict=False)
    with pytest.raises(torch.OutOfMemoryError):
        fit(report, module=Spilling(small), data=batches(4, ROWS, sized(512, LENGTH)))
    assert report.failed is not None
    assert FAILED.exists() is (device.type == "cuda")
    needs_cuda("torch has snapshots of its allocator alone")
    segments, trace = read(FAILED)
    assert segments
    assert "oom" in {entry["action"] for entry in trace}
    assert not torch._C._cuda_isHistoryEnabled()
