"""What cuBLAS keeps, beside a pool that keeps it as torch's does: by handle, which is a thread's, and by stream."""

import re
from pathlib import Path

import pytest
import torch

import lightning_memkit
from lightning_memkit.memory.cublas import cublas_bytes

PACKAGE = Path(lightning_memkit.__file__).parent
# Each of them copies, and multiplies nothing.
WITH_STREAMS = {
    "activations/offload_choice.py",
    "activations/offload_parcels.py",
    "data/loading/copy_ahead.py",
    "optim/state_home.py",
}


class HandlePool:
    """`aten/src/ATen/cuda/CublasHandlePool.cpp`: a workspace at a pair's first product, which is never freed."""

    def __init__(self, workspace_bytes: int) -> None:
        self.workspace_bytes = workspace_bytes
        self.kept: set[tuple[str, int]] = set()

    def step(self, stream: int) -> None:
        """A product in the forward, and its gradients' in the thread that autograd has for the device."""
        self.kept |= {("forward", stream), ("backward", stream)}

    @property
    def bytes(self) -> int:
        return self.workspace_bytes * len(self.kept)


@pytest.mark.parametrize(("major", "workspace"), [(9, 32 << 20), (8, 8_320 << 10), (12, 8_320 << 10)])
def test_steps_on_one_stream_keep_what_is_counted_and_a_second_stream_as_much_again(
    monkeypatch: pytest.MonkeyPatch, major: int, workspace: int
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: (major, 0))
    counted, pool = cublas_bytes(torch.device("cuda")), HandlePool(workspace)
    for _ in range(3):
        pool.step(stream=0)
        assert pool.bytes == counted
    pool.step(stream=1)
    assert pool.bytes == 2 * counted


def test_no_stream_of_memkit_s_own_runs_products() -> None:
    """A file that makes one is named here once it was read for products: they would not be counted."""
    made = re.compile(r"\b(?:torch|cuda)\.Stream\(")
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if made.search(path.read_text("utf-8"))
    }
    assert found == WITH_STREAMS
