"""What the tests of activation offload share: a model without surprises, a step, and the host as a device."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memkit.activations import offload_parcels, offload_visits
from tests.activations.models import VOCABULARY, Block

WIDTH, DEPTH, ROWS, LENGTH = 64, 6, 8, 32


class Deep(nn.Module):
    """An embedding, repeated blocks with dropout, a head."""

    def __init__(self, width: int = WIDTH, depth: int = DEPTH, dropout: float = 0.2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.head = nn.Linear(width, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def ids(rows: int = ROWS, length: int = LENGTH, seed: int = 1) -> Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module, batch: Tensor, backwards: int = 1) -> list[Tensor]:
    """Loss and gradients of one step with a fixed seed, on the host."""
    model.zero_grad()
    torch.manual_seed(3)
    loss = model(batch).float().square().mean()
    for index in range(backwards):
        loss.backward(retain_graph=index + 1 < backwards)
    return [loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters() if p.grad is not None)]


def assert_same(ours: list[Tensor], plain: list[Tensor]) -> None:
    assert len(ours) == len(plain) > 1
    for index, (a, b) in enumerate(zip(ours, plain, strict=True)):
        assert torch.equal(a, b), index


class _NoStream:
    """On the host everything is in order."""

    def __init__(self, *_: Any) -> None:
        pass

    def __enter__(self) -> "_NoStream":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass

    wait_event = wait_stream

    def synchronize(self) -> None:
        pass

    def record_event(self) -> "_NoStream":
        return self


class _HostLane:
    def __init__(self, device: torch.device) -> None:
        self.device, self.outward, self.inward = device, _NoStream(), _NoStream()


@contextmanager
def host_as_device() -> Iterator[None]:
    """Tensors on the CPU are moved as if it were an accelerator; hand `pin_memory=False` over."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload_visits, "_HOST_MEMORY", ("meta",))
        patch.setattr(offload_visits, "Lane", _HostLane)
        patch.setattr(offload_parcels, "_current_stream", _NoStream)
        yield
