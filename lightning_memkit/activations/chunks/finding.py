"""Finds the largest modules of a step that treat rows, or tokens, independently, by asking them."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from lightning_memkit.activations.chunks.axes import AxisName, ChunkError, find_axis, paths_and_leaves
from lightning_memkit.activations.chunks.call import ChunkedCall
from lightning_memkit.activations.chunks.given_again import count_weights, is_cheap_beside
from lightning_memkit.activations.chunks.independence import check_independence
from lightning_memkit.utilities.generators import held_generators

Storages = dict[int, int]  # of data pointers: bytes


@dataclass(frozen=True)
class ChunkableModule:
    """A module that can run in chunks.

    Attributes:
        name: its name within the module that was asked.
        module: the module.
        freed_bytes: what its forward saved in the step that was asked, beside its arguments, outputs and weights.
    """

    name: str
    module: nn.Module
    freed_bytes: int


@dataclass
class _Seen:
    """The first call of a module in the step, and what was saved in all of them."""

    call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    given: set[int] = field(default_factory=set)  # data pointers of its arguments
    gave: set[int] = field(default_factory=set)  # and of its outputs
    saved: Storages = field(default_factory=dict)
    output_bytes: int = 0
    communicates: bool = False

    @property
    def freed_bytes(self) -> int:
        return sum(size for pointer, size in self.saved.items() if pointer not in self.given | self.gave)


def find_chunkable(
    module: nn.Module, step: Callable[[], Any], axis: AxisName, issued: Callable[[], int | None] = lambda: 0
) -> list[ChunkableModule]:
    """The outermost modules whose rows (or tokens) don't act on each other, and whose chunks would free memory.

    Costs one forward of the step, and about eight small ones of each module on the way down to those that are found.
    Names play no part: a module is run with some rows replaced and in halves. One that saves no more than it gives
    (a single linear layer, an embedding) is left out, since the whole outputs of a chunked module are kept; unless it
    reads what a much smaller module in chunks gives (a projection behind a norm), which then needn't be kept either.

    Args:
        module: its submodules are asked, from the outside in.
        step: one forward over a few different rows, with gradient; what it changes besides is the caller's.
        axis: `"rows"` or `"tokens"`.
        issued: how many collectives this rank has issued so far, None if that is unknown. A module that issues some is
            not asked, nor chunked: ranks might do so unequally often.

    Returns:
        The modules in the order of `named_modules`; none lies within another.
    """
    seen = {id(part): _Seen() for part in module.modules()}
    with _watched(module, seen, issued):
        step()
    found = list(_asked(module, "", seen, axis))
    found += _readers(module, found, seen, axis)
    places = {name: place for place, (name, _) in enumerate(module.named_modules())}
    return sorted(found, key=lambda one: places[one.name])


def _readers(
    module: nn.Module, found: list[ChunkableModule], seen: dict[int, _Seen], axis: AxisName
) -> Iterator[ChunkableModule]:
    """Modules that read what much smaller ones of those found give: in chunks it is computed again, not kept."""
    weights = {id(part): count_weights(part) for part in module.modules()}
    inside = {id(part) for one in found for part in one.module.modules()}
    for name, part in module.named_modules():
        note = seen[id(part)]
        if id(part) in inside or note.call is None or note.communicates:
            continue
        read = {
            pointer
            for one in found
            for pointer in seen[id(one.module)].gave & note.given
            if is_cheap_beside(weights[id(one.module)], weights[id(part)])
        }
        if read and _is_independent(part, note.call, axis):
            inside |= {id(one) for one in part.modules()}
            yield ChunkableModule(name, part, sum(note.saved.get(pointer, 0) for pointer in read))


def _asked(
    module: nn.Module, prefix: str, seen: dict[int, _Seen], axis: AxisName
) -> Iterator[ChunkableModule]:
    for name, child in module.named_children():
        path, found = f"{prefix}{name}", seen[id(child)]
        if found.call is not None and found.freed_bytes <= found.output_bytes:
            continue  # nor is there more within it
        if found.call is not None and not found.communicates and _is_independent(child, found.call, axis):
            yield ChunkableModule(path, child, found.freed_bytes)
        else:
            yield from _asked(child, f"{path}.", seen, axis)


def _is_independent(module: nn.Module, given: tuple[tuple[Any, ...], dict[str, Any]], name: AxisName) -> bool:
    leaves, structure = paths_and_leaves(*given)
    axis = find_axis(name, sys.maxsize, leaves)  # as many as the check asks at most
    if axis is None or axis.count < 2:
        return False
    call = ChunkedCall(
        module.forward, leaves, structure, (axis,), held_generators(module, (torch.Generator,))
    )
    try:
        return check_independence(module, call).is_final
    except ChunkError:
        return False


@contextmanager
def _watched(root: nn.Module, seen: dict[int, _Seen], issued: Callable[[], int | None]) -> Iterator[None]:
    """Note the calls of all submodules, and what is saved within each."""
    running: list[_Seen] = []
    before: list[int | None] = []
    weights = {one.untyped_storage().data_ptr() for one in (*root.parameters(), *root.buffers())}

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        note = seen[id(module)]
        if note.call is None:
            note.call = (args, kwargs)
        note.given |= {_pointer(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        running.append(note)
        before.append(issued())

    def leave(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        note, count = running.pop(), before.pop()
        note.communicates |= count is None or issued() != count
        tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        note.gave |= set(map(_pointer, tensors))
        note.output_bytes += sum(one.nbytes for one in tensors)

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            for note in running:
                note.saved[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # an output that its own node kept as this very object would never be freed

    with ExitStack() as stack:
        for part in root.modules():
            if part is not root:
                handles = (
                    part.register_forward_pre_hook(enter, with_kwargs=True, prepend=True),
                    part.register_forward_hook(leave, with_kwargs=True),
                )
                for handle in handles:
                    stack.callback(handle.remove)
        stack.enter_context(torch.enable_grad())
        stack.enter_context(saved_tensors_hooks(pack, lambda tensor: tensor))
        yield


def _pointer(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
