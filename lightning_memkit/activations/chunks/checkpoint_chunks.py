"""Runs a module in chunks of rows or tokens, recomputed one by one in the backward."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from lightning_memkit.activations.chunks.axes import (
    AxisName,
    ChunkAxis,
    ChunkError,
    find_axis,
    is_ends,
    paths_and_leaves,
)
from lightning_memkit.activations.chunks.call import ChunkedCall
from lightning_memkit.activations.chunks.function import ChunkedFunction
from lightning_memkit.activations.chunks.independence import A_TENSOR, CheckedOutputs, check_independence
from lightning_memkit.utilities.generators import held_generators
from lightning_memkit.utilities.patching import Undo, replace_method

_MARK = "_memkit_chunked"
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def checkpoint_chunks(module: nn.Module, rows: int | None = None, tokens: int | None = None) -> Undo:
    """Keep one chunk of a module's activations at a time; costs one more forward of the module.

    The module's forward runs without gradient, chunk by chunk, and what it gives is joined: the loss, hooks, metrics
    and counters see the whole batch, once. In the backward each chunk runs again, with gradient, and each parameter
    gets one gradient for all of them, summed in float32 if it has 16 bits. So any loss over the outputs is exact:
    contrastive ones, with negatives within the batch, too. Memory: the outputs and their gradients, and one chunk.

    Random numbers are drawn chunk by chunk and again in the recomputation: dropout has other masks than without
    chunks. A call of at most one chunk runs as it is. Without gradients the module runs in chunks, too.

    Args:
        module: rows (or tokens) must not act on each other in it; the first call with several chunks asks it, on a few
            of them, and refuses what batch statistics, attention over tokens or a mean over rows couple.
        rows: at most so many of the first dimension in a chunk. Every argument whose first dimension is as long as
            that of the first tensor is split; others are given whole.
        tokens: at most so many of the second dimension, also of one row. Where the module gets `cu_seqlens`, chunks
            end where documents do, and a document that is longer is a chunk of its own.

    Returns:
        The undo: calling it restores the forward.

    Raises:
        ValueError: neither size is given, one is less than 1, or the module is in chunks already.
        ChunkError: in the first call that has several chunks: rows or tokens act on each other, the forward changes
            the module's buffers or attributes, or it reads a tensor with a graph that is no argument.

    Source: Gao et al. 2021, arXiv:2101.06983 (gradient cache); sequence tiling as in ALST, arXiv:2506.13996.
    """
    sizes: dict[AxisName, int] = {}
    given: tuple[tuple[AxisName, int | None], ...] = (("rows", rows), ("tokens", tokens))
    for name, size in given:
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ValueError(f"{name}={size!r} in a chunk; give a whole number from 1.")
        if size is not None:
            sizes[name] = size
    if not sizes:
        raise ValueError("No size of a chunk is given; give rows=..., tokens=..., or both.")
    if hasattr(module.__dict__.get("forward"), _MARK):
        raise ValueError(
            f"{type(module).__name__} runs in chunks already; call the undo of the first call before."
        )
    runner = _Runner(sizes)
    undo = replace_method(module, "forward", runner.run, mark=_MARK)

    def undone() -> None:
        runner.is_on = False  # if another patch lies over this one, it passes calls through from now on
        undo()

    return undone


class _Runner:
    """Runs the forwards of a module and of its copies, and knows which calls were checked."""

    def __init__(self, sizes: dict[AxisName, int]) -> None:
        self.is_on = True
        self._sizes = sizes
        self._checked: WeakKeyDictionary[nn.Module, dict[Any, CheckedOutputs]] = WeakKeyDictionary()

    @torch.compiler.disable(recursive=False)
    def run(self, module: nn.Module, plain: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """One forward."""
        leaves, structure = paths_and_leaves(args, kwargs, _names(type(module).forward))
        axes = self._axes(module, leaves) if self.is_on else ()
        if not axes:
            return plain(*args, **kwargs)
        call = ChunkedCall(plain, leaves, structure, axes, held_generators(module, (torch.Generator,)))
        if len(call.chunks) == 1:
            return plain(*args, **kwargs)
        _refuse_objects(module, leaves)
        _refuse_shards_within(module)
        checked = self._check(module, call)
        parameters = {id(one): one for one in (*module.parameters(), *checked.outside)}
        tensors = iter(ChunkedFunction.apply(call, checked.places, *call.tensors(), *parameters.values()))
        return tree_unflatten(
            [next(tensors) if leaf is A_TENSOR else leaf for leaf in checked.leaves], checked.structure
        )

    def _axes(self, module: nn.Module, leaves: Sequence[tuple[str, Any]]) -> tuple[ChunkAxis, ...]:
        """Those that have more than one chunk."""
        found = []
        for name, size in self._sizes.items():
            axis = find_axis(name, size, leaves)
            if axis is None:
                raise ChunkError(
                    f"{type(module).__name__} gets no tensor that has {name}, and can't run in chunks of them: of its "
                    f"tensors the first has rows in its first dimension and tokens in its second."
                )
            if name == "tokens":
                axis = replace(axis, ends=_document_ends(module, axis, leaves))
            if axis.count > axis.size:
                found.append(axis)
        return tuple(found)

    def _check(self, module: nn.Module, call: ChunkedCall) -> CheckedOutputs:
        of_module = self._checked.setdefault(module, {})
        key = (
            tuple(part.training for part in module.modules()),
            tuple(parameter.requires_grad for parameter in module.parameters()),
            tuple((path, _kind(leaf)) for path, leaf in call.leaves),
            tuple((axis.name, axis.dims, axis.ends is None) for axis in call.axes),
        )
        checked = of_module.get(key)
        if checked is None:
            checked = check_independence(module, call)
            if checked.is_final:
                of_module[key] = checked
        return checked


@cache
def _names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """What a forward calls its arguments by position."""
    try:
        parameters = list(signature(forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return ()
    return tuple(
        one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    )


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.dtype, leaf.ndim, leaf.requires_grad
    return leaf if isinstance(leaf, _PLAIN) else type(leaf)


def _document_ends(
    module: nn.Module, axis: ChunkAxis, leaves: Sequence[tuple[str, Any]]
) -> tuple[int, ...] | None:
    """Where documents end in a packed row, if the module is told."""
    given = next((leaf for path, leaf in leaves if isinstance(leaf, Tensor) and is_ends(path)), None)
    if given is None:
        return None
    ends = tuple(int(end) for end in given.tolist() if end > 0)
    if ends[-1:] != (axis.count,):
        raise ChunkError(
            f"{type(module).__name__} gets packed rows of {axis.count} tokens whose documents end at {ends[-1:]}: "
            "documents of several rows end at different tokens. Give chunks of rows, rows=..., without tokens=...."
        )
    return ends


def _refuse_shards_within(module: nn.Module) -> None:
    """FSDP2 gathers and averages around each module that it shards: a chunk's backward must not run across several."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    from torch.distributed.fsdp import FSDPModule

    within = [
        name for name, part in module.named_modules() if part is not module and isinstance(part, FSDPModule)
    ]
    if within:
        raise ChunkError(
            f"{type(module).__name__} holds modules that FSDP2 shards by themselves ({', '.join(within[:3])}). Run "
            "these in chunks, each by itself: they are then gathered once for all chunks."
        )


def _refuse_objects(module: nn.Module, leaves: Sequence[tuple[str, Any]]) -> None:
    for path, leaf in leaves:
        held = vars(leaf).values() if hasattr(leaf, "__dict__") and not isinstance(leaf, Tensor) else ()
        if hasattr(leaf, "get_seq_length") or any(isinstance(value, Tensor) for value in held):
            raise ChunkError(
                f"{type(module).__name__} gets a {type(leaf).__name__} as {path}, whose tensors can't be split or "
                "would be written once a chunk. Give tensors; a cache of keys and values is of no use in training "
                "(use_cache=False)."
            )
