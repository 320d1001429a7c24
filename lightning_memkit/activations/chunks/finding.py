"""Finds the largest modules of a step that treat rows, or tokens, independently, by asking them."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from lightning_memkit.activations.chunks.axes import AxisName, find_axis, paths_and_leaves
from lightning_memkit.activations.chunks.call import ChunkedCall
from lightning_memkit.activations.chunks.copies_asked import CopiesAsked, most_asked_of
from lightning_memkit.activations.chunks.given_again import count_weights, is_cheap_beside
from lightning_memkit.activations.chunks.independence import MOST_ASKED
from lightning_memkit.activations.chunks.units import WeightUnit, units_of
from lightning_memkit.memory.meter import storages_of
from lightning_memkit.utilities.generators import held_generators


@dataclass(frozen=True)
class ChunkableModule:
    """A module that can run in chunks.

    Attributes:
        name: its name within the module that was asked.
        module: the module.
        freed_bytes: what its forward saved in the step that was asked, beside its arguments, outputs and weights.
        count: the rows or tokens of its first call.
    """

    name: str
    module: nn.Module
    freed_bytes: int
    count: int


@dataclass
class _Seen:
    """A few rows and tokens of a module's first call in the step, and what was saved in all of them."""

    call: ChunkedCall | None = None
    count: int = 0
    freed_bytes: int = 0
    output_bytes: int = 0
    communicates: bool = False
    # Bytes that it reads of what another module gave, by that module's id
    read: dict[int, int] = field(default_factory=dict)


class _Running:
    """A call under way: which storages its arguments have, and those that were saved since it began."""

    def __init__(self, given: set[int], issued: int | None) -> None:
        self.given, self.issued = given, issued
        self.saved: dict[int, tuple[StorageWeakRef, int]] = {}
        self.freed_bytes = 0

    def save(self, storage: UntypedStorage) -> None:
        known = self.saved.get(storage._cdata)
        if known is not None and not known[0].expired():
            return
        if known is not None:  # nothing is kept here, so that another one may get its place
            self.freed_bytes += known[1]
        self.saved[storage._cdata] = StorageWeakRef(storage), storage.nbytes()

    def end(self, gave: set[int]) -> int:
        """The bytes that were saved, without arguments and outputs."""
        kept = self.given | gave
        return self.freed_bytes + sum(
            size for pointer, (alive, size) in self.saved.items() if alive.expired() or pointer not in kept
        )


def find_chunkable(
    module: nn.Module,
    step: Callable[[], Any],
    axis: AxisName,
    issued: Callable[[], int | None] = lambda: 0,
    *,
    has_backward: bool = False,
) -> list[ChunkableModule]:
    """The outermost modules whose rows (or tokens) don't act on each other, and whose chunks would free memory.

    Costs the step, and small forwards and backwards (see `check_independence`) of each module on the way down to those
    that are found. Names play no part: a module is run with some rows replaced and in halves. One that saves less than
    it gives (a single linear layer, an embedding) is left out; unless it reads what a much smaller module in chunks
    gives (a projection behind a norm), which then needn't be kept either. None holds several modules that FSDP2 shards
    by themselves: it would gather within chunks.

    Args:
        module: its submodules are asked, from the outside in. Where some are sharded, all ranks must ask.
        step: one forward over a few different rows, with gradient; what it changes besides is the caller's.
        axis: `"rows"` or `"tokens"`.
        issued: how many collectives this rank has issued so far, None if that is unknown. A module that issues some in
            its forward is not asked, nor chunked: ranks might do so unequally often.
        has_backward: the step runs its backward, too; else nothing is kept for one.

    Returns:
        The modules in the order of `named_modules`; none lies within another.
    """
    watch = _Watch(module, axis, issued, keeps=has_backward)
    with watch.entered():
        step()
    asked = _Asked(watch.seen)
    found: list[ChunkableModule] = []
    failure: Exception | None = None
    for unit in units_of(module):
        with unit.gathered():  # on all ranks, whatever happens on this one
            try:
                found += asked.of(unit) if failure is None else []
            except Exception as error:
                failure = error
    if failure is not None:
        raise failure
    places = {id(part): place for place, part in enumerate(module.modules())}
    return sorted({id(one.module): one for one in found}.values(), key=lambda one: places[id(one.module)])


class _Asked:
    """Asks modules, by what was seen of them."""

    def __init__(self, seen: dict[int, _Seen]) -> None:
        self._seen, self._copies = seen, CopiesAsked()

    def of(self, unit: WeightUnit) -> list[ChunkableModule]:
        """Those of a unit whose weights are there."""
        found = [one for name, top in unit.tops.items() for one in self.within(name, top)]
        return [*found, *self.readers(unit, found)]

    def within(self, name: str, module: nn.Module) -> Iterator[ChunkableModule]:
        """The module, or the outermost ones within it."""
        found = self._seen[id(module)]
        if found.freed_bytes < found.output_bytes:
            return  # nor is there more within it
        if self._may_be_chunked(module, found):
            yield ChunkableModule(name, module, found.freed_bytes, found.count)
            return
        for inner, child in module.named_children():
            yield from self.within(f"{name}.{inner}", child)

    def readers(self, unit: WeightUnit, found: list[ChunkableModule]) -> Iterator[ChunkableModule]:
        """Modules that read what much smaller ones of those found give: in chunks it is computed again, not kept."""
        weights = {id(one.module): count_weights(one.module) for one in found}
        inside = {id(part) for one in found for part in one.module.modules()}
        for name, part in unit.modules().items():
            note = self._seen[id(part)]
            own = count_weights(part)
            read = sum(
                size
                for one, size in note.read.items()
                if one in weights and is_cheap_beside(weights[one], own)
            )
            if read and id(part) not in inside and self._may_be_chunked(part, note):
                inside |= {id(one) for one in part.modules()}
                yield ChunkableModule(name, part, read, note.count)

    def _may_be_chunked(self, module: nn.Module, note: _Seen) -> bool:
        return (
            note.call is not None and not note.communicates and self._copies.is_independent(module, note.call)
        )


class _Watch:
    """Notes the calls of all submodules of a step, and what is saved within each.

    Args:
        root: holds the modules.
        axis: by what their calls are sampled.
        issued: counts collectives.
        keeps: what is saved for a backward.
    """

    def __init__(
        self, root: nn.Module, axis: AxisName, issued: Callable[[], int | None], *, keeps: bool
    ) -> None:
        self.seen = {id(part): _Seen() for part in root.modules()}
        self._axis: AxisName = axis
        self._keeps = keeps
        self._root, self._issued = root, issued
        self._weights = _pointers(*_weights(root))
        self._running: list[_Running] = []
        self._hooks: list[saved_tensors_hooks] = []
        self._givers: dict[int, tuple[StorageWeakRef, int]] = {}  # of storages: the module that gave one last

    @contextmanager
    def entered(self) -> Iterator[None]:
        with ExitStack() as stack:
            for part in self._root.modules():
                if part is not self._root:
                    handles = (
                        # After FSDP2's own, which gathers.
                        part.register_forward_pre_hook(self._enter, with_kwargs=True),
                        part.register_forward_hook(self._leave, with_kwargs=True),
                    )
                    for handle in handles:
                        stack.callback(handle.remove)
            stack.enter_context(torch.enable_grad())
            stack.callback(self._end)
            self._hooks.append(self._hook())
            yield

    def _hook(self) -> saved_tensors_hooks:
        """Begin to note what is saved; in each module anew, as activation checkpointing around it notes it, too."""
        hook = saved_tensors_hooks(self._pack, lambda kept: torch.empty(0) if kept is None else kept)
        hook.__enter__()
        return hook

    def _end(self) -> None:
        """Stop; in modules, too, whose forward failed."""
        while self._hooks:
            self._hooks.pop().__exit__()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _is_backward():  # recomputed
            return
        note = self.seen[id(module)]
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for one in tensors:
            for pointer in _pointers(one):
                alive, giver = self._givers.get(pointer, (None, 0))
                if alive is not None and not alive.expired() and giver != id(module):
                    note.read[giver] = max(note.read.get(giver, 0), one.nbytes)
        if note.call is None:
            self._sample(module, note, args, kwargs)
        # Gathered weights were not there when the step began.
        self._running.append(_Running(_pointers(*tensors, *_weights(module)), self._issued()))
        self._hooks.append(self._hook())

    def _sample(self, module: nn.Module, note: _Seen, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Copies of a few rows and tokens of the arguments: the step may write to them."""
        leaves, structure = paths_and_leaves(args, kwargs)
        axis = find_axis(self._axis, sys.maxsize, leaves)
        if axis is None or axis.count < 2:
            return
        note.count, first = axis.count, axis.first(most_asked_of(leaves, MOST_ASKED[self._axis]))
        held = held_generators(module, (torch.Generator,))
        call = ChunkedCall(module.forward, leaves, structure, (first,), held)
        parts = call.given(((0, first.count),), call.tensors())
        for index, part in zip(call.indices, parts, strict=True):
            path, tensor = leaves[index]
            leaves[index] = path, part.clone().requires_grad_(tensor.requires_grad)
        note.call = ChunkedCall(module.forward, leaves, structure, (first,), held)

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        if _is_backward():
            return
        self._hooks.pop().__exit__()
        note, running = self.seen[id(module)], self._running.pop()
        note.communicates |= running.issued is None or self._issued() != running.issued
        tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        note.freed_bytes += running.end(_pointers(*tensors))
        note.output_bytes += sum(one.nbytes for one in tensors)
        for storage in (storage for one in tensors for storage in storages_of(one)):
            self._givers[storage._cdata] = StorageWeakRef(storage), id(module)

    def _pack(self, tensor: Tensor) -> Tensor | None:
        for storage in storages_of(tensor):
            if storage._cdata not in self._weights:
                for running in self._running:
                    running.save(storage)
        # Not the tensor itself: an output that its own node keeps as a Python object would never be freed.
        return tensor.detach() if self._keeps else None


def _weights(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _pointers(*tensors: Tensor) -> set[int]:
    return {storage._cdata for one in tensors for storage in storages_of(one)}


def _is_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
