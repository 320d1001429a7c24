"""Find and snapshot what a value holds at any depth: tensors, containers, objects, functions, iterators.

A snapshot is an object of a `Kept...` class: it remembers one value, tells whether it has changed, and
restores it.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from inspect import unwrap
from types import FunctionType, MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from lightning_memkit.micro_batching.changes import own_objects as own
from lightning_memkit.micro_batching.changes.array_walk import ArrayWalk
from lightning_memkit.micro_batching.changes.kept_access import KeptAccess, KeptCache, access_to, is_cache
from lightning_memkit.micro_batching.changes.kept_classes import KeptClassAttributes
from lightning_memkit.micro_batching.changes.kept_contents import (
    BYTES,
    KeptCell,
    KeptGenerator,
    KeptLength,
    KeptSample,
)
from lightning_memkit.micro_batching.changes.kept_iterator import KeptIterator
from lightning_memkit.micro_batching.changes.kept_state import (
    Kept,
    KeptDict,
    KeptHooks,
    KeptItems,
    KeptSlots,
)
from lightning_memkit.micro_batching.changes.kept_tensor import TENSOR_HOOKS, KeptTensor, Place
from lightning_memkit.micro_batching.changes.spare_copies import SpareCopies
from lightning_memkit.micro_batching.changes.step_changes import CONTAINERS, ChangeKind, label
from lightning_memkit.micro_batching.changes.tensor_attributes import NamesOfTorch
from lightning_memkit.utilities.class_attributes import class_attributes
from lightning_memkit.utilities.generators import GENERATORS
from lightning_memkit.utilities.rewindable import Rewindable, make_rewindable

Keys = frozenset[tuple[str, str]]

PLAIN_KINDS = frozenset(
    {int, float, str, bytes, bool, complex, type(None), torch.dtype, torch.device, torch.Size}
)


class ValueWalk(ABC):
    """Collects snapshots of what values hold, in the order in which they are found.

    Args:
        roots: the packages whose classes and functions are the user's.
        changing: the tensors to clone; if None, buffers and attributes that are tensors.
        apart: objects that are not followed: the run's own optimizers.
        spares: copies of other tensors from earlier steps.
    """

    def __init__(
        self,
        roots: frozenset[str],
        changing: Keys | None,
        apart: Iterable[object] = (),
        spares: SpareCopies | None = None,
    ) -> None:
        self._roots, self._changing = roots, changing
        self._spares, self._arrays = spares, ArrayWalk(changing, spares)
        self._kept: list[Kept] = []
        self._long: list[Kept] = []  # of those, the snapshots of long containers and large arrays
        self._tensors: list[KeptTensor] = []
        self._seen: set[int] = set(map(id, apart))
        self._objects = 0

    @abstractmethod
    def _keep_module(self, path: str, owner: nn.Module) -> None:
        """Snapshot a module, without its submodules."""

    def _keep_hooks(self, place: Place, tables: dict[str, Any]) -> None:
        """Snapshot tables of hooks, and the state that the user's hooks hold."""
        tables = {name: hooks for name, hooks in tables.items() if isinstance(hooks, dict)}
        if not tables:
            return
        self._kept.append(KeptHooks(place, tables.values()))
        for name, hooks in tables.items():
            for hook in hooks.values():
                self._keep_value(Place(path=place.path, name=f"{name}[...]", kind="object"), hook)

    def _keep_class_attributes(self, place: Place, kind: type) -> None:
        """Snapshot the attributes of a user's class and of its bases, with what their functions hold."""
        for base in own.own_classes(kind, self._roots):
            if id(base) in self._seen:
                continue
            self._seen.add(id(base))
            self._kept.append(KeptClassAttributes(place, base))
            for name, value in class_attributes(base).items():
                if type(value) not in PLAIN_KINDS:
                    self._keep_value(Place(path=base.__name__, name=name, kind="attribute"), value)
            beside = {**own.functions_with_state(base), **own.objects_of_class(base, self._roots)}
            for name, item in beside.items():
                self._keep_value(Place(path=base.__name__, name=name, kind="object"), item)

    def _keep_value(self, place: Place, value: Any, depth: int = 0) -> None:
        """Snapshot any value that an attribute, a container or an object holds."""
        if type(value) in PLAIN_KINDS or depth > own.DEEPEST:
            return
        if isinstance(value, Tensor):
            self._keep_tensor(place, value)
        elif isinstance(value, (tuple, frozenset)):
            for index, item in enumerate(value if len(value) <= own.MOST_ITEMS else ()):
                self._keep_value(place.below(f"[{index}]"), item, depth + 1)
        elif isinstance(value, MappingProxyType):
            for name, item in _named_items(value) if len(value) <= own.MOST_ITEMS else ():
                self._keep_value(place.below(name), item, depth + 1)
        elif id(value) in self._seen:
            return
        elif isinstance(value, nn.Module):
            for below, child in value.named_modules():
                self._keep_module(
                    ".".join(part for part in (label(place.path, place.name), below) if part), child
                )
        elif isinstance(value, (np.ndarray, *BYTES)):
            self._keep_array(place, value)
        elif isinstance(value, Rewindable):
            self._seen.add(id(value))
            self._kept.append(
                KeptIterator(place if place.kind == "batch" else place.of_kind("object"), value)
            )
        elif is_cache(value):
            self._seen.add(id(value))
            self._kept.append(KeptCache(place, value))
            self._keep_value(place, unwrap(value), depth + 1)
        elif isinstance(value, GENERATORS):
            self._seen.add(id(value))
            kind: ChangeKind = "generator" if place.kind == "attribute" else place.kind
            self._kept.append(KeptGenerator(place.of_kind(kind), value))
            if isinstance(value, np.random.Generator):  # counts the generators that were spawned
                self._keep_value(place.below(".seed_seq"), getattr(value.bit_generator, "seed_seq", None))
        elif self._objects < own.MOST_OBJECTS:
            if isinstance(value, CONTAINERS):
                self._keep_contents(
                    place.of_kind("container") if place.kind == "attribute" else place, value, depth
                )
            else:
                self._keep_object(place, value, depth)

    def _keep_tensor(self, place: Place, tensor: Tensor) -> None:
        if id(tensor) in self._seen:
            return
        self._seen.add(id(tensor))
        if self._changing is not None:
            cloned = place.key in self._changing
        else:
            cloned = (
                not isinstance(tensor, nn.Parameter) and place.kind != "batch" and not tensor.requires_grad
            )
        kept = KeptTensor(place, tensor, cloned=cloned)
        self._tensors.append(kept)
        if self._spares is not None and kept.copy is None and place.kind != "batch" and not is_lazy(tensor):
            kept.spare = self._spares.of(tensor)
            kept.pair = None if kept.spare is None else self._spares.pair(tensor)
        if not is_lazy(tensor):
            self._keep_hooks(place, {name: getattr(tensor, name, None) for name in TENSOR_HOOKS})
        if not kept.is_bare:
            self._keep_tensor_attributes(place.of_attributes(), tensor)

    def _keep_tensor_attributes(self, place: Place, tensor: Tensor) -> None:
        make_rewindable(tensor.__dict__)
        attributes = KeptDict(place, vars(tensor), NamesOfTorch(tensor), attributes=True)
        self._kept.append(attributes)
        for name, value in attributes.items.items():
            if type(value) not in PLAIN_KINDS:
                self._keep_value(place.below(f".{name}"), value)

    def _keep_array(self, place: Place, value: Any) -> None:
        self._seen.add(id(value))
        one = self._arrays.snapshot(place, value)
        if one is not None:
            self._kept.append(one)
        if isinstance(one, KeptSample):
            self._long.append(one)
        if isinstance(value, np.ndarray) and value.dtype == object and value.size <= own.MOST_ITEMS:
            for index, item in enumerate(value.flat):
                self._keep_value(place.below(f".flat[{index}]"), item)

    def _keep_contents(self, place: Place, value: Any, depth: int = 0) -> None:
        """Snapshot a container and, unless it is too long, its items."""
        self._seen.add(id(value))
        self._objects += 1
        is_long = len(value) > own.MOST_ITEMS
        if not is_long:
            make_rewindable(value)
        if is_long and self._changing is not None and place.key not in self._changing:
            self._kept.append(KeptLength(place, value))
        elif isinstance(value, dict):
            self._kept.append(KeptDict(place, value, attributes=False))
        else:
            self._kept.append(KeptItems(place, value))
        if is_long:
            self._long.append(self._kept[-1])
        if not is_long and self._looks_into(value):
            for name, item in _named_items(value):
                if type(item) not in PLAIN_KINDS:
                    self._keep_value(place.below(name), item, depth + 1)
        if type(value).__module__ not in ("builtins", "collections"):
            self._keep_attributes(place, value, depth)

    def _looks_into(self, container: Any) -> bool:
        """Whether the items of a container are recorded, too, not only the list of them."""
        return True

    def _keep_object(self, place: Place, value: Any, depth: int) -> None:
        """Snapshot a class, a function with its closure and defaults, or an object that is recorded."""
        if isinstance(value, type):
            self._keep_class_attributes(place, value)
            return
        access = access_to(value)
        if access is not None:
            self._seen.add(id(value))
            self._kept.append(
                KeptAccess(place.of_kind("object") if place.kind != "batch" else place, value, access)
            )
            return
        if isinstance(value, (FunctionType, functools.partial)):
            make_rewindable(value)
        cells, carried = own.closure_of(value, self._roots)
        if cells or carried or own.is_users_function(value, self._roots):
            self._keep_function(place, value, cells, carried, depth)
        elif (place.kind == "batch" and hasattr(value, "__dict__")) or own.is_own(value, self._roots):
            self._seen.add(id(value))
            self._objects += 1
            self._keep_attributes(place if place.kind == "batch" else place.of_kind("object"), value, depth)

    def _keep_given(self, place: Place, value: Any) -> None:
        """Snapshot an object, whatever its class."""
        if isinstance(value, CONTAINERS):
            self._keep_value(place, value)
        elif id(value) not in self._seen:
            self._seen.add(id(value))
            self._keep_attributes(place, value, 0)

    def _keep_attributes(self, place: Place, value: Any, depth: int) -> None:
        place = place.of_kind("object") if place.kind in ("attribute", "container") else place
        if isinstance(getattr(value, "__dict__", None), dict):
            make_rewindable(vars(value))
            self._kept.append(KeptDict(place, vars(value), attributes=True))
        if own.slots_of(type(value)):
            self._kept.append(KeptSlots(place, value))
        self._keep_class_attributes(place, type(value))
        for name, item in own.state_of(value).items():
            self._keep_value(place.below(f".{name}"), item, depth + 1)

    def _keep_function(
        self, place: Place, value: Any, cells: list[Any], carried: list[Any], depth: int
    ) -> None:
        if place.kind == "attribute":
            place = place.of_kind("object")
        self._seen.add(id(value))
        self._objects += 1
        if isinstance(value, FunctionType):
            self._kept.append(KeptDict(place, vars(value), attributes=True))
            for name, item in vars(value).items():
                self._keep_value(place.below(f".{name}"), item, depth + 1)
        names = getattr(getattr(value, "__code__", None), "co_freevars", ())
        for name, cell in zip(names, cells, strict=False):
            if id(cell) not in self._seen:
                self._seen.add(id(cell))
                make_rewindable(cell)
                one = KeptCell(place.below(f".{name}"), cell)
                self._kept.append(one)
                self._keep_value(one.place, one.content, depth + 1)
        for item in carried:
            self._keep_value(place, item, depth + 1)


def _named_items(container: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(container, Mapping):
        return [(_named(index, key), item) for index, (key, item) in enumerate(container.items())]
    return [(f"[{index}]", item) for index, item in enumerate(container)]


def _named(index: int, key: Any) -> str:
    """A key as it is written; of a parameter or an object its place in the order of keys."""
    return (
        f"[{key!r}]"
        if type(key) in PLAIN_KINDS or isinstance(key, tuple)
        else f"[{type(key).__name__} {index}]"
    )


def is_lazy(tensor: Tensor) -> bool:
    """Whether a tensor belongs to a lazy module that has no shapes yet."""
    return isinstance(tensor, (UninitializedBuffer, UninitializedParameter))
