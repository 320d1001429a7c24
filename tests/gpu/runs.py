"""Fits on the device under test, gradients of one step, and the noise that two equal runs have."""

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from tests.gpu.card import accelerator, on_cpu
from tests.gpu.models import Language, batches
from tests.plugins.toys import trainer, weights


def fit(
    *callbacks: Any, module: LightningModule | None = None, data: Any = None, steps: int = 4, **options: Any
) -> Tensor:
    """The weights after a fit on the device, in host memory; from one seed."""
    module = Language() if module is None else module
    torch.manual_seed(1)
    given = {"accelerator": accelerator(), **options}
    fitted = trainer(*callbacks, max_steps=steps, **given)
    fitted.fit(module, batches(steps) if data is None else data)
    return weights(module).cpu()


def gradients(model: nn.Module, loss: Callable[[], Tensor]) -> list[Tensor]:
    """The loss and the gradients of one step; they stay on the device, where a billion are compared in no time."""
    model.zero_grad()
    torch.manual_seed(3)
    value = loss()
    value.backward()
    found = [value.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    model.zero_grad(set_to_none=True)
    return found


def distance(ours: Sequence[Tensor], plain: Sequence[Tensor]) -> float:
    """The largest difference of any two tensors, relative to the second one's norm."""
    assert len(ours) == len(plain) > 0
    return max(_distance(a.float(), b.float()) for a, b in zip(ours, plain, strict=True))


def _distance(ours: Tensor, plain: Tensor) -> float:
    return float((ours - plain).norm() / plain.norm().clamp_min(1e-30))


def assert_within_noise(ours: Sequence[Tensor], plain: Sequence[Sequence[Tensor]], most: float = 4.0) -> None:
    """Ours differs from a plain run by no more than any two of those differ; where they don't, by no bit.

    Args:
        ours: tensors of one run.
        plain: those of several plain ones: kernels that sum by atomics differ from run to run, seldom by much.
        most: times their largest difference.
    """
    noise = max(distance(one, other) for one, other in combinations(plain, 2))
    nearest = min(distance(ours, one) for one in plain)
    assert nearest <= most * noise, f"ours differs by {nearest:.3g}, plain runs by up to {noise:.3g}"


def peak_of(device: torch.device, work: Callable[[], Any]) -> int:
    """The most bytes of tensors while something runs: the allocator's, on the CPU those that a meter counts."""
    from lightning_memkit.memory.meter import ByteMeter

    if on_cpu():
        with ByteMeter() as meter:
            work()
        return meter.peak_bytes
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
