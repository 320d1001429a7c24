"""Two cards: ranks weigh together, agree over NCCL that one of them ran out, and end as one process does."""

import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.gpu.card import ROOT, on_cpu
from tests.gpu.two_cards import BOTH_BACKENDS, ONE_BACKEND, trained
from tests.plugins.noise import NOISE

pytestmark = [pytest.mark.gpu, *NOISE]


CASES = (*ONE_BACKEND, *BOTH_BACKENDS)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One launch for each kind of group; on the CPU two gloo ranks."""
    if not on_cpu() and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    folder, results = tmp_path_factory.mktemp("ranks"), {}
    for number, cases in enumerate((ONE_BACKEND, BOTH_BACKENDS)):
        path = folder / f"{number}.pt"
        command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone",
                   "-m", "tests.gpu.two_cards", str(path), *cases]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-3000:]
        results |= torch.load(path)
    return results


@pytest.fixture(scope="module")
def alone() -> torch.Tensor:
    """The weights of one process with the whole batches, without memkit."""
    return trained()[0]


@pytest.mark.parametrize("case", CASES)
def test_ranks_end_as_one_process_does(found: dict[str, Any], alone: torch.Tensor, case: str) -> None:
    assert found[case]["spread"] == 0
    assert float((found[case]["weights"] - alone).abs().max()) <= 1e-10


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_retry_where_one_ran_out(found: dict[str, Any], case: str) -> None:
    assert found[case]["retries"] == ((1, 1) if case.endswith("runs out") else (0, 0))


@pytest.mark.parametrize("case", CASES)
def test_collectives_are_counted_on_the_backends_of_the_group(found: dict[str, Any], case: str) -> None:
    """Otherwise no rank could catch up after a step that another one did not end."""
    backends = found[case]["backends"]
    if not on_cpu():
        assert "cuda:nccl" in backends
        assert ("cpu:gloo" in backends) is (case in BOTH_BACKENDS)
    for issued in found[case]["issued"]:
        assert len(issued) > 0
        assert all(count is not None and count > 0 for count in issued)
