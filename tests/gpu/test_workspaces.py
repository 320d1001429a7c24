"""cuBLAS's workspaces, as `cublas_bytes` counts them and as the allocator holds them."""

import pytest
import torch

from lightning_memkit import Budget
from lightning_memkit.memory.cublas import cublas_bytes
from tests.gpu.card import accelerator, needs_cuda, script

pytestmark = pytest.mark.gpu
UNIT = 512  # the allocator's
# The sum's own result, and what it works in.
SLACK = 8 * UNIT


@pytest.mark.parametrize("config", ["", ":4096:8", ":4096:2:16:8", ":16:8"])
def test_training_keeps_what_is_counted(config: str) -> None:
    found = script("workspaces", accelerator(), CUBLAS_WORKSPACE_CONFIG=config)
    if accelerator() == "cpu":
        assert found == {"foretold": 0}
    needs_cuda("the CPU's library has no workspaces that stay")
    assert found["forward"] == pytest.approx(found["foretold"] // 2, abs=SLACK)
    assert found["both"] == pytest.approx(found["foretold"], abs=SLACK)
    # One a handle and stream: what runs products on streams of its own takes more.
    assert found["on a side stream"] == pytest.approx(3 * found["foretold"] // 2, abs=SLACK)


def test_the_device_that_is_planned_for_has_them(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    target = Budget("auto", "auto").target()
    if device.type == "cpu":
        assert cublas_bytes(device) == 0
        return
    assert target is not None
    assert 2 * target.library_bytes == cublas_bytes(device)
