"""Which kernel SDPA takes by shape: what a prediction says that it saves, and what it saves on this card."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memkit import Budget
from lightning_memkit.prediction.persona import as_on_cuda
from tests.gpu.card import needs_cuda

pytestmark = pytest.mark.gpu
BF16, LENGTH = torch.bfloat16, 512


@dataclass(frozen=True, kw_only=True)
class Case:
    dtype: torch.dtype = BF16
    width: int = 64
    value_width: int | None = None
    heads: int = 8
    key_heads: int = 8
    mask: str = ""
    dropout: float = 0.0
    causal: bool = True
    length: int = LENGTH


CASES = {
    "causal": Case(),
    "whole": Case(causal=False),
    "wide": Case(width=128),
    "widest": Case(width=256),
    "beyond flash": Case(width=320),
    "unaligned width": Case(width=60),
    "unaligned length": Case(length=LENGTH - 3),
    "float16": Case(dtype=torch.float16),
    "float32": Case(dtype=torch.float32),
    "dropout": Case(dropout=0.1),
    "mask of booleans": Case(mask="bool", causal=False),
    "additive mask": Case(mask="float", causal=False),
    "unaligned mask": Case(mask="bool", causal=False, length=LENGTH - 3),
    "float32 with a mask": Case(mask="bool", causal=False, dtype=torch.float32),
    "grouped": Case(key_heads=2),
    "grouped with a mask": Case(key_heads=2, mask="bool", causal=False),
    "grouped in float32": Case(key_heads=2, dtype=torch.float32),
    "other values": Case(value_width=32),
}


class Kernels(TorchDispatchMode):
    """Notes the attention operators that run; none of them is plain arithmetic, which makes all scores."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001
        name = func.overloadpacket.__name__
        if name.startswith("_scaled_dot_product") and "math" not in name:
            self.names.append(name.removeprefix("_scaled_dot_product_").removesuffix("_attention"))
        return func(*args, **(kwargs or {}))


@contextmanager
def saved_bytes(*, besides: Iterable[Tensor] = ()) -> Iterator[Callable[[], int]]:
    """What autograd keeps within it, counted by storage; some tensors' storages don't count."""
    kept: dict[int, Tensor] = {}
    others = {tensor.untyped_storage()._cdata for tensor in besides}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in others:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield lambda: sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def attended(case: Case, device: torch.device) -> tuple[list[str], int]:
    """The kernels of a case, and what the backward needs of it."""

    def tensor(heads: int, width: int) -> Tensor:
        shape = (2, heads, case.length, width)
        return torch.randn(shape, device=device, dtype=case.dtype, requires_grad=True)

    query, key = tensor(case.heads, case.width), tensor(case.key_heads, case.width)
    value = tensor(case.key_heads, case.value_width or case.width)
    mask = None
    if case.mask:
        mask = torch.ones(2, 1, case.length, case.length, device=device, dtype=torch.bool).tril()
        if case.mask == "float":
            mask = torch.zeros(mask.shape, device=device, dtype=case.dtype).masked_fill(~mask, -torch.inf)
    with saved_bytes() as saved, Kernels() as kernels:
        out = F.scaled_dot_product_attention(
            query, key, value, mask, case.dropout, case.causal, enable_gqa=case.key_heads != case.heads
        )
    size = saved()
    if device.type == "cuda":
        out.sum().backward()  # a kernel whose backward refuses would be no choice
    return kernels.names, size


@pytest.mark.parametrize("name", CASES)
def test_the_prediction_saves_what_the_card_saves(device: torch.device, name: str) -> None:
    target = Budget("auto", "auto").target()
    prefers_cudnn = target is not None and target.prefers_cudnn
    with FakeTensorMode(allow_non_fake_inputs=True), as_on_cuda(prefers_cudnn=prefers_cudnn):
        foretold, foretold_bytes = attended(CASES[name], torch.device("cpu"))
    assert foretold_bytes > 0
    needs_cuda("the CPU's own attention is not asked")
    taken, taken_bytes = attended(CASES[name], device)
    scores = {bool(taken), bool(foretold)}
    assert len(scores) == 1, f"predicted {foretold or 'math'}, taken {taken or 'math'}"
    # Flash and cuDNN save the same but for a few words of random state.
    assert foretold_bytes == pytest.approx(taken_bytes, rel=0.05)
