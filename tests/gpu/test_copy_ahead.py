"""Batches that are copied one ahead arrive whole and in order, from pinned memory and from other."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lightning_memkit.data.loading.copy_ahead import copied_ahead, copies_help
from lightning_memkit.memory.units import parse_bytes
from tests.gpu.card import needs_cuda, on_cpu, sized
from tests.gpu.overlap import copies_beside_compute

pytestmark = pytest.mark.gpu
COUNT = 8
SIZE = parse_bytes("64MiB")


def batches(pinned: bool, size: int) -> Iterator[dict[str, Tensor]]:
    """The host lets go of each at once, and its memory is used again."""
    for number in range(COUNT):
        x = torch.full((size // 4,), float(number))
        yield {"x": x.pin_memory() if pinned and not on_cpu() else x}


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "not pinned"])
def test_the_same_batches_arrive(device: torch.device, pinned: bool) -> None:
    size = sized(SIZE, 1024)
    ahead = batches(pinned, size) if on_cpu() else copied_ahead(device)(batches(pinned, size))
    count = 0
    for number, batch in enumerate(ahead):
        assert batch["x"].device.type == device.type
        # On the compute stream, without a wait of the host: a copy that is not over would show.
        wrong = (batch["x"] != number).sum()
        batch["x"].fill_(-1)  # what was let go of must not be written before it was used
        assert int(wrong) == 0
        count += 1
    assert count == COUNT
    assert copies_help(device) is not on_cpu()


def test_pinned_batches_are_copied_beside_the_step(device: torch.device) -> None:
    needs_cuda("the CPU has no streams")
    weight = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)

    def loop() -> None:
        for _ in copied_ahead(device)(batches(True, SIZE)):
            for _ in range(8):
                torch.mm(weight, weight)

    loop()
    torch.cuda.synchronize()
    copies, beside = copies_beside_compute(loop, "HtoD")
    assert copies == COUNT
    assert beside >= COUNT // 2
