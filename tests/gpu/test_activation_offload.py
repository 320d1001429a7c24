"""Activation offload: the same gradients, a lower peak, and copies that run beside the arithmetic."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_memkit import ActivationOffload, offload_activations
from lightning_memkit.memory.pinned import return_pinned
from tests.activations.offload_models import host_as_device
from tests.gpu.card import needs_cuda, on_cpu, sized
from tests.gpu.models import Decoder, tokens
from tests.gpu.overlap import copies_beside_compute
from tests.gpu.runs import assert_within_noise, fit, gradients, peak_of
from tests.plugins.noise import NOISE

pytestmark = [pytest.mark.gpu, *NOISE]
LENGTH = 1024


@pytest.fixture(autouse=True)
def the_host_is_a_device() -> Any:
    """Without a card its memory is moved as if it were one's."""
    if not on_cpu():
        yield
        return
    with host_as_device():
        yield


def prepared(device: torch.device) -> tuple[Decoder, Tensor]:
    """Little vocabulary, so that blocks hold nearly all that is saved."""
    torch.manual_seed(0)
    model = Decoder(sized(512, 64), sized(1024, 32), sized(12, 6), sized(16, 2)).to(device, torch.bfloat16)
    return model, tokens(8, sized(LENGTH, 32)).to(device)


def offloaded(model: Decoder, **options: Any) -> Any:
    return offload_activations(model, min_bytes=1024, pin_memory=not on_cpu(), **options)


@pytest.mark.usefixtures("deterministic")
def test_gradients_are_bitwise_the_same_and_the_peak_is_lower(device: torch.device) -> None:
    model, ids = prepared(device)
    plain = gradients(model, lambda: model.loss(ids))
    most = peak_of(device, lambda: gradients(model, lambda: model.loss(ids)))
    with offloaded(model) as handle:
        for _ in range(3):  # buffers are used again from the second step on
            ours = gradients(model, lambda: model.loss(ids))
            assert all(map(torch.equal, ours, plain))
        assert handle.counts.moved_bytes > 0
        assert handle.counts.kept_bytes == 0
        if not on_cpu():
            assert peak_of(device, lambda: gradients(model, lambda: model.loss(ids))) < 0.8 * most


def test_without_deterministic_kernels_they_differ_by_noise(device: torch.device) -> None:
    model, ids = prepared(device)
    plain = [gradients(model, lambda: model.loss(ids)) for _ in range(4)]
    with offloaded(model):
        assert_within_noise(gradients(model, lambda: model.loss(ids)), plain)


def test_copies_run_beside_the_arithmetic_in_both_directions(device: torch.device) -> None:
    model, ids = prepared(device)
    with offloaded(model):
        for _ in range(2):
            model.loss(ids).backward()
        needs_cuda("the CPU has no streams")
        for direction in ("DtoH", "HtoD"):
            copies, beside = copies_beside_compute(lambda: model.loss(ids).backward(), direction)
            # A block's copies take longer than its arithmetic: of each block's, some meet a kernel, not all.
            assert copies >= len(model.blocks)
            assert beside >= len(model.blocks) // 2


def test_a_block_s_bytes_leave_while_the_next_one_computes(device: torch.device) -> None:
    """The compute stream is held up by a kernel that only spins; by events, the copies before it are over first."""
    model, ids = prepared(device)
    with offloaded(model) as handle:
        model.loss(ids).backward()
        (lane,) = handle._traffic._lanes.values()
        needs_cuda("the CPU has no streams")
        left: list[torch.Event] = []
        spun = torch.cuda.Event()

        def spin(*_: Any) -> None:
            left.append(lane.outward.record_event())
            torch.cuda._sleep(4_000_000_000)  # cycles: about two seconds, far more than the host needs below
            spun.record()

        hook = model.blocks[2].register_forward_pre_hook(spin)
        loss = model.loss(ids)
        hook.remove()
        left[0].synchronize()
        assert not spun.query()
        loss.backward()


@pytest.mark.usefixtures("device", "deterministic")
def test_in_a_trainer_pinned_memory_goes_back() -> None:
    needs_cuda("the callback does nothing on the CPU")
    plain = fit(precision="bf16-mixed")
    ours = fit(ActivationOffload("4KiB"), precision="bf16-mixed")
    assert torch.equal(ours, plain)
    return_pinned()
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] == 0
