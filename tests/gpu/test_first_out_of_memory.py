"""A first call that runs out of memory says nothing about a kernel: it is used once there is room again."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

from lightning_memkit.loss import backends
from lightning_memkit.loss.chunks import HeadTerms
from lightning_memkit.optim.fused import gpu
from lightning_memkit.optim.fused import step as front_door
from tests.gpu.card import needs_cuda, needs_package

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def unknown() -> Iterator[None]:
    """What this process knows of kernels is forgotten, before and after."""
    known: list[Any] = [gpu.why_unavailable, front_door._has_kernel, backends._disproof, backends._automatic]
    for answers in known:
        getattr(answers, "cache_clear", lambda: None)()
    yield
    for answers in known:
        getattr(answers, "cache_clear", lambda: None)()


def exhausted(device: torch.device) -> list[torch.Tensor]:
    """All that is left in segments that tensors of other tests keep alive."""
    taken = []
    for size in (1 << 20, 512):
        with suppress(torch.OutOfMemoryError):
            while True:
                taken.append(torch.empty(size, dtype=torch.uint8, device=device))
    return taken


def test_the_optimizer_s_kernel_is_used_after_all(device: torch.device) -> None:
    needs_cuda("the kernels are Triton's")
    needs_package("triton")
    torch.cuda.set_per_process_memory_fraction(1e-9, device)
    taken = exhausted(device)
    try:
        why = gpu.why_unavailable()
    except torch.OutOfMemoryError:
        why = "out of memory"
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    taken.clear()
    assert why is not None  # else the card had room, and this tests nothing
    assert gpu.why_unavailable() is None
    assert front_door._has_kernel("cuda")


def test_a_loss_kernel_is_proved_again(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = backends._plain(HeadTerms())
    calls: list[str] = []

    def kernel(*given: Any) -> torch.Tensor:
        calls.append("called")
        if len(calls) == 1:
            raise torch.OutOfMemoryError("as a card says it")
        return plain(*given)

    def ask() -> str | None:
        try:
            return backends._disproof("liger", "sum", device, torch.float32, HeadTerms())
        except torch.OutOfMemoryError:
            return "out of memory"

    monkeypatch.setattr(backends, "_kernel", lambda name, terms: kernel)
    assert ask() is not None
    assert ask() is None
