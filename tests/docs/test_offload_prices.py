"""The tables of prices on the pages of the two offloads: what each way takes, counted on the simulated device."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_memkit import checkpoint_modules, compensate
from lightning_memkit.activations.offload import offload_activations
from lightning_memkit.optim.offload import offload_states
from tests.testing.fake_device import FakeDevice, fake_device
from tests.testing.needs import NEEDS_COMPILER

pytestmark = NEEDS_COMPILER
TECHNIQUES = Path(__file__).parents[2] / "docs" / "techniques"


def price(page: str) -> list[list[str]]:
    """The rows of the first table below "Price"."""
    text = (TECHNIQUES / page).read_text(encoding="utf-8").split("## Price", 1)[1]
    rows = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)[0].splitlines()[2:]
    return [row.strip("| ").split(" | ") for row in rows]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def backward(device: FakeDevice, way: str) -> tuple[tuple[int, int, int], list[Tensor]]:
    """Peak above the weights, bytes moved and bytes pinned, and the gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(64) for _ in range(16))).to(device.torch_device)
    x = torch.randn(2048, 64).to(device.torch_device)
    undo = checkpoint_modules(model) if "checkpointed" in way else lambda: None
    offload = offload_activations(model, min_bytes="64KiB") if "offloaded" in way else lambda: None
    before = device.live_bytes
    device.reset_peak()
    device.reset_counts()
    model(x).square().mean().backward()
    moved = device.transfers.to_host_bytes + device.transfers.to_device_bytes
    gradients = [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]
    counted = device.peak_bytes - before, moved, device.pinned_bytes
    offload()
    undo()
    return counted, gradients


def test_the_price_of_activation_offload() -> None:
    with fake_device() as device:
        backward(device, "plain")  # the first run makes what torch keeps
        _, expected = backward(device, "plain")
        rows = price("activation_offload.md")
        assert [row[0] for row in rows] == ["plain", "offloaded", "checkpointed", "checkpointed + offloaded"]
        for way, *shown in rows:
            counted, gradients = backward(device, way)
            assert all(map(torch.equal, gradients, expected))
            assert shown == [f"{count / 2**20:.1f} MiB" if count else "0" for count in counted]


def train(device: FakeDevice, dtype: torch.dtype, offload: bool) -> tuple[float, float, list[Tensor]]:
    """Peak bytes and bytes moved, each a parameter, in the last of three steps, and the weights after it."""
    torch.manual_seed(0)
    layers = (nn.Linear(128, 128, bias=False) for _ in range(48))
    model = nn.Sequential(*layers).to(device.torch_device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    if dtype == torch.bfloat16:
        compensate(optimizer, bucket_bytes=1)
    if offload:
        offload_states(optimizer, bucket_bytes=128 * 128 * 8)
    batch = torch.randn(4, 128).to(device.torch_device, dtype)
    for _ in range(3):
        device.reset_peak()
        device.reset_counts()
        model(batch).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        optimizer.step()
        optimizer.zero_grad()
    moved = device.transfers.to_device_bytes + device.transfers.to_host_bytes
    weights = [parameter.detach().cpu() for parameter in model.parameters()]
    count = sum(parameter.numel() for parameter in model.parameters())
    return device.peak_bytes / count, moved / count, weights


@pytest.mark.parametrize(("row", "dtype"), [(0, torch.float32), (1, torch.bfloat16)])
def test_the_price_of_optimizer_offload(row: int, dtype: torch.dtype) -> None:
    with fake_device() as device:
        peak, _, expected = train(device, dtype, offload=False)
        lower, moved, weights = train(device, dtype, offload=True)
    assert all(map(torch.equal, weights, expected))
    shown = price("optimizer_offload.md")[row]
    assert shown[1:] == [f"{peak:.2f} B", f"{lower:.2f} B", f"{lower / peak:.2f}", f"{moved:.0f} B"]
