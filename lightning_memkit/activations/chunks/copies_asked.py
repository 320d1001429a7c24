"""Asks modules whose tensors have no values, such as those of a prediction: copies of them, with random weights."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from lightning_memkit.activations.chunks.axes import ChunkError
from lightning_memkit.activations.chunks.call import ChunkedCall
from lightning_memkit.activations.chunks.independence import check_independence

_MOST_WEIGHT_BYTES = 1 << 30  # a module with more holds others that are asked
_ASKED = 16  # rows or tokens


def most_asked_of(leaves: Sequence[tuple[str, Any]], most: int) -> int:
    """Of how many rows or tokens arguments are kept for a question: fewer where they have no values."""
    return min(most, _ASKED) if any(isinstance(leaf, FakeTensor) for _, leaf in leaves) else most


class CopiesAsked:
    """Knows the answers of modules by their kind: those of a model's blocks are asked once for all of them."""

    def __init__(self) -> None:
        self._known: dict[Any, bool] = {}

    def is_independent(self, module: nn.Module, call: ChunkedCall) -> bool:
        """Whether the rows or tokens of a call don't act on each other in the module.

        Where they have no values, a copy of it is asked, on 16 rows or tokens (see `check_independence`).
        """
        if not any(isinstance(one, FakeTensor) for one in call.tensors()):
            return _answer(module, call)
        weights = [*module.named_parameters(), *module.named_buffers()]
        if sum(one.numel() * one.element_size() for _, one in weights) > _MOST_WEIGHT_BYTES:
            return False
        kind = (
            type(module),
            tuple((name, one.shape, one.dtype) for name, one in weights),
            tuple((path, _kind(leaf)) for path, leaf in call.leaves),
        )
        if kind not in self._known:
            try:
                with _disable_current_modes():
                    self._known[kind] = _answer(*_with_values(module, call))
            except Exception:  # whatever a copy raises over random numbers
                self._known[kind] = False
        return self._known[kind]


def _answer(module: nn.Module, call: ChunkedCall) -> bool:
    try:
        return check_independence(module, call).is_final
    except ChunkError:
        return False


def _with_values(module: nn.Module, call: ChunkedCall) -> tuple[nn.Module, ChunkedCall]:
    """A copy of a module and of its call, with random numbers in the place of fake tensors."""
    generator = torch.Generator().manual_seed(0)
    memo: dict[int, Any] = {
        id(one): nn.Parameter(_filled(one, generator), requires_grad=one.requires_grad)
        for one in module.parameters()
    }
    memo |= {id(one): _filled(one, generator) for one in module.buffers()}
    asked = copy.deepcopy(module, memo)
    axes = tuple(replace(axis.first(_ASKED), size=_ASKED) for axis in call.axes)
    short = ChunkedCall(module.forward, call.leaves, call.structure, axes)
    given = short.given(tuple((0, axis.count) for axis in axes), short.tensors())
    leaves = list(call.leaves)
    for index, tensor in zip(call.indices, given, strict=True):
        leaves[index] = leaves[index][0], _filled(tensor, generator)
    return asked, ChunkedCall(asked.forward, leaves, call.structure, axes)


def _filled(like: Tensor, generator: torch.Generator) -> Tensor:
    """Random numbers of the same shape and dtype; zeros and ones where these are whole numbers."""
    if like.is_floating_point():
        return torch.randn(tuple(like.shape), generator=generator).to(like.dtype).requires_grad_(False)
    return torch.randint(0, 2, tuple(like.shape), generator=generator).to(like.dtype)


def _kind(leaf: Any) -> Any:
    return (leaf.dtype, leaf.ndim) if isinstance(leaf, Tensor) else type(leaf)
