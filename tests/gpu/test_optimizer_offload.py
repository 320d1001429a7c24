"""Optimizer states in host memory: the same weights bit for bit, a lower peak, copies beside the steps."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_memkit import GradientRelease, MemoryBudget, OptimizerOffload, PureBF16Precision
from lightning_memkit.optim.offload import offload_states
from tests.gpu.card import needs_cuda, on_cpu, sized
from tests.gpu.models import Language
from tests.gpu.overlap import copies_beside_compute
from tests.gpu.runs import fit, peak_of
from tests.plugins.noise import NOISE

pytestmark = [
    pytest.mark.gpu,
    *NOISE,
    pytest.mark.filterwarnings("ignore:The parameters of AdamW are on cpu"),
]
BUCKET = "4MiB"
WIDTH, DEPTH = 4096, 16
PRECISIONS: dict[str, Any] = {
    "float32": dict,
    "bf16-mixed": lambda: {"precision": "bf16-mixed"},
    "kahan": lambda: {"plugins": [PureBF16Precision()]},
    "split exact": lambda: {"plugins": [PureBF16Precision("split", "exact")]},
}


@pytest.mark.usefixtures("device", "deterministic")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_weights_are_bitwise_those_without_it(precision: str) -> None:
    plain = fit(module=Language(), **PRECISIONS[precision]())
    ours = fit(OptimizerOffload(BUCKET), module=Language(), **PRECISIONS[precision]())
    assert torch.equal(ours, plain)


@pytest.mark.usefixtures("device", "deterministic")
@pytest.mark.parametrize(
    "beside",
    [lambda: GradientRelease(bundle_bytes=0), lambda: MemoryBudget(sized(2 << 30, 64 << 20), 4)],
    ids=["gradient release", "memory budget"],
)
def test_beside_other_plugins_too(beside: Any) -> None:
    plain = fit(beside(), module=Language())
    ours = fit(beside(), OptimizerOffload(BUCKET), module=Language())
    assert torch.equal(ours, plain)


def stepped(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    width = sized(WIDTH, 16)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(DEPTH))).to(device)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def test_a_step_holds_three_buckets(device: torch.device) -> None:
    model, optimizer = stepped(device)
    layer = 2 * sum(parameter.nbytes for parameter in model.parameters()) // DEPTH
    offload = offload_states(optimizer, bucket_bytes=layer, pin_memory=not on_cpu())
    optimizer.step()
    needs_cuda("the states of the CPU's parameters are at home")
    assert offload.bytes_on_host() == DEPTH * layer
    assert peak_of(device, optimizer.step) <= 5 * layer  # three, and what the foreach step works in


def test_copies_run_beside_the_steps(device: torch.device) -> None:
    model, optimizer = stepped(device)
    layer = 2 * sum(parameter.nbytes for parameter in model.parameters()) // DEPTH
    offload_states(optimizer, bucket_bytes=layer, pin_memory=not on_cpu())
    optimizer.step()
    needs_cuda("the CPU has no streams")
    for direction in ("HtoD", "DtoH"):
        copies, beside = copies_beside_compute(optimizer.step, direction)
        assert copies >= DEPTH
        # A step is over much sooner than the copies of the next states: some, not all, meet one.
        assert beside >= 2
