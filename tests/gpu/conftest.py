"""The device of these tests, left empty by each of them, and torch's deterministic mode."""

import gc
import sys
from collections.abc import Iterator

import pytest
import torch

from tests.gpu.card import on_cpu

_LONG = 5.0  # seconds
# Warnings that torch gives of itself, on a card alone: while it compiles, and in the first backward of a process.
_OF_TORCH = (
    "ignore:The .grad attribute of a Tensor that is not a leaf",
    "ignore:.torch.jit.script(_method)?. is deprecated:DeprecationWarning",
    "ignore:TensorFloat32 tensor cores",
    "ignore:Attempting to run cuBLAS, but there was no current CUDA context",
    "ignore:Synchronization debug mode is a prototype feature",
)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Errors, as all warnings are, are those of memkit's own."""
    for words in _OF_TORCH:
        item.add_marker(pytest.mark.filterwarnings(words))


@pytest.fixture(scope="session", autouse=True)
def workspaces() -> Iterator[None]:
    """What deterministic products need; of the session, since torch reads it once, at its first product."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        yield


@pytest.fixture
def device() -> Iterator[torch.device]:
    """CUDA, on which nothing of other tests is left; the CPU where that is asked for."""
    if on_cpu():
        yield torch.device("cpu")
        return
    _empty()
    yield torch.device("cuda", 0)
    # What a test that failed may have left: the ones after it would fail as well.
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.set_per_process_memory_fraction(1.0, 0)
    _empty()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Say at once what failed and what took long: `scripts/first_card.sh` may stop the tests at its limit."""
    here = report.nodeid.startswith("tests/gpu/")
    if here and (report.failed or report.duration > _LONG):
        print(
            f"\n{report.when} of {report.nodeid}: {report.outcome}, {report.duration:.1f} s",
            file=sys.__stdout__,
        )
    if here and report.failed:
        print(report.longreprtext, file=sys.__stdout__, flush=True)


def _empty() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()  # they would count with the next test's peak before its first product
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Attention's backward and others sum by atomics otherwise: no two runs are bitwise equal."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
