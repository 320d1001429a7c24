"""Runs the forwards of modules in chunks, once they were asked whether that gives the same."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from lightning_memkit.activations.chunks.function import ChunkedArguments, ChunkedOutputs
from lightning_memkit.activations.chunks.given_again import count_weights, mark_given, sources_of
from lightning_memkit.activations.chunks.independence import A_TENSOR, CheckedOutputs, check_independence
from lightning_memkit.activations.chunks.units import sharded_within
from lightning_memkit.utilities.generators import held_generators
from lightning_memkit.utilities.patching import Undo, replace_method

_MARK = "_memkit_chunked"
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


@dataclass
class ChunkSizes:
    """How much a chunk holds; may change between steps.

    Attributes:
        rows: at most so many of the first dimension; None for all.
        tokens: at most so many of the second dimension; None for all.
    """

    rows: int | None = None
    tokens: int | None = None


class ChunkedForwards:
    """Runs the forwards of modules, and of their copies, in chunks; knows which kinds of calls were checked.

    Args:
        sizes: of chunks.
        refuses: raise an error where a call can't run in chunks; else it runs as it is.
        only_with_gradient: leave calls without gradient as they are.
        unit: number of the modules whose weights are gathered together; None if that is unknown.
        mark: an attribute of forwards that run so; a module has each mark once.
    """

    def __init__(
        self,
        sizes: ChunkSizes,
        *,
        refuses: bool = True,
        only_with_gradient: bool = False,
        unit: int | None = None,
        mark: str = _MARK,
    ) -> None:
        self.is_on = True
        self._unit, self._mark = unit, mark
        self._sizes, self._refuses, self._only_with_gradient = sizes, refuses, only_with_gradient
        self._checked: WeakKeyDictionary[nn.Module, dict[Any, CheckedOutputs | None]] = WeakKeyDictionary()

    def patch(self, module: nn.Module) -> Undo:
        """Run this module's forwards in chunks from here on.

        Raises:
            ValueError: it does so already.
        """
        if hasattr(module.__dict__.get("forward"), self._mark):
            raise ValueError(
                f"{type(module).__name__} runs in chunks already; call the undo of the first call before."
            )
        return replace_method(module, "forward", self.run, mark=self._mark)

    @torch.compiler.disable(recursive=False)
    def run(self, module: nn.Module, plain: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """One forward."""
        if not self.is_on or (self._only_with_gradient and not torch.is_grad_enabled()):
            return plain(*args, **kwargs)
        leaves, structure = paths_and_leaves(args, kwargs, _names(type(module).forward))
        axes = self._axes(module, leaves)
        held = held_generators(module, (torch.Generator,))
        call = ChunkedCall(plain, leaves, structure, axes, held, count_weights(module), self._unit)
        checked = self._check(module, call) if len(call.chunks) > 1 else None
        if checked is None:
            return plain(*args, **kwargs)
        parameters = {id(one): one for one in (*module.parameters(), *checked.outside)}
        call.sources, given = sources_of(call), tuple(call.tensors())
        outputs = ChunkedOutputs.apply(
            call, checked.places, ChunkedArguments.apply(call, *given, *parameters.values())
        )
        mark_given(outputs, call, checked.places, given)
        tensors = iter(outputs)
        return tree_unflatten(
            [next(tensors) if leaf is A_TENSOR else leaf for leaf in checked.leaves], checked.structure
        )

    def _axes(self, module: nn.Module, leaves: Sequence[tuple[str, Any]]) -> tuple[ChunkAxis, ...]:
        """Those that have more than one chunk."""
        found = []
        asked: tuple[tuple[AxisName, int | None], ...] = (
            ("rows", self._sizes.rows),
            ("tokens", self._sizes.tokens),
        )
        for name, size in asked:
            axis = None if size is None else find_axis(name, size, leaves)
            if size is None or (axis is None and not self._refuses):
                continue
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

    def _check(self, module: nn.Module, call: ChunkedCall) -> CheckedOutputs | None:
        """What the module gives; None if it can't run in chunks, and runs as it is."""
        of_module = self._checked.setdefault(module, {})
        key = (
            tuple(part.training for part in module.modules()),
            tuple(parameter.requires_grad for parameter in module.parameters()),
            tuple((path, _kind(leaf)) for path, leaf in call.leaves),
            tuple((axis.name, axis.dims, axis.ends is None) for axis in call.axes),
        )
        if key in of_module:
            return of_module[key]
        try:
            _refuse_objects(module, call.leaves)
            _refuse_shards_within(module)
            checked = check_independence(module, call)
        except ChunkError:
            if self._refuses:
                raise
            checked = None
        if checked is None or checked.is_final:
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
    if within := sharded_within(module):
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
