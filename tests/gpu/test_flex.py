"""FlexAttention stays compiled: for all lengths, for more kinds of layers than torch's limit, beside checkpointing."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from lightning_memkit import checkpoint_modules, packed_attention
from lightning_memkit.attention import flex
from tests.attention.fused import GRAPHS, LENGTHS, fused_only
from tests.gpu.card import needs_cuda, on_cpu, sized
from tests.gpu.runs import distance, gradients, peak_of
from tests.plugins.noise import NOISE

__all__ = ["fused_only"]

pytestmark = [
    pytest.mark.gpu,
    *NOISE,
    pytest.mark.usefixtures("fused_only"),
]
HEADS, FEATURES = 4, 64
NEAR = 0.02  # of the norm, in bfloat16


def bounds_on(device: torch.device, bounds: list[int]) -> Tensor:
    return torch.tensor(bounds, dtype=torch.int32, device=device)


def attended(backend: str, bounds: Tensor, features: int = FEATURES, *, trains: bool = True) -> list[Tensor]:
    """The output, and the gradients of its sum of squares."""
    tokens, device = int(bounds[-1]), bounds.device
    given = torch.randn(3, 1, tokens, HEADS, features, generator=torch.Generator().manual_seed(0))
    leaves = [x.to(device, torch.bfloat16).transpose(1, 2).requires_grad_(trains) for x in given]
    query, key, value = leaves
    chosen: Any = "loop" if on_cpu() else backend
    out = packed_attention(query, key, value, bounds, backend=chosen)
    if trains:
        out.float().square().sum().backward()
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def compiled() -> int:
    """How many graphs torch has compiled so far."""
    return counters["stats"]["unique_graphs"]


@pytest.fixture
def compiles_anew() -> Iterator[None]:
    """What met the limit runs uncompiled from then on, in later tests, too."""

    def forget() -> None:
        flex._attention.cache_clear()
        torch._dynamo.reset()

    forget()
    yield
    forget()


@pytest.mark.usefixtures("compiles_anew")
def test_one_kind_of_layer_is_compiled_for_all_lengths(device: torch.device) -> None:
    """Each graph more is a compilation in the midst of training; beyond `recompile_limit` nothing is compiled."""
    before = compiled()
    with torch._dynamo.config.patch(recompile_limit=GRAPHS):
        for bounds in LENGTHS:
            given = bounds_on(device, bounds)
            assert distance(attended("flex", given), attended("loop", given)) <= NEAR
    needs_cuda("FlexAttention's kernels with a backward")
    assert 0 < compiled() - before <= GRAPHS


def test_more_kinds_of_layers_stay_compiled_than_torch_compiles_a_function_for(device: torch.device) -> None:
    """Under torch's own limit: what decides is that none runs uncompiled, of which `fused_only` makes an error."""
    given, limit = bounds_on(device, [0, 300, 1000]), torch._dynamo.config.recompile_limit
    for kind in range(sized(limit + 1, 2)):
        features = 16 * (1 + kind)
        found = attended("flex", given, features, trains=False)
        assert distance(found, attended("loop", given, features, trains=False)) <= NEAR


class Packed(nn.Module):
    """A block of packed attention and a gated MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, bounds: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = packed_attention(query, key, value, bounds, backend="loop" if on_cpu() else "flex")
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(self.up(x).relu())


class Blocks(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Packed(width) for _ in range(4))

    def forward(self, x: Tensor, bounds: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, bounds)
        return x.float().square().mean()


@pytest.mark.parametrize("policy", ["selective", "selective:attention", "budget:0.5", "full"])
def test_beside_checkpointing_no_scores_are_in_memory(device: torch.device, policy: str) -> None:
    """Where operators are recorded the loop takes its place: another rounding, and no more bytes."""
    torch.manual_seed(0)
    tokens = sized(8192, 64)
    model = Blocks(HEADS * FEATURES).to(device, torch.bfloat16)
    x = torch.randn(1, tokens, HEADS * FEATURES, device=device, dtype=torch.bfloat16)
    bounds = bounds_on(device, [0, tokens // 4, tokens])
    plain = gradients(model, lambda: model(x, bounds))
    checkpoint_modules(model, policy)
    for _ in range(3):
        assert distance(gradients(model, lambda: model(x, bounds)), plain) <= NEAR
    peak = peak_of(device, lambda: model(x, bounds).backward())
    needs_cuda("the CPU's loop keeps the scores of a document")
    assert peak < 2 * HEADS * tokens * tokens  # those of one block, in 16 bits
