"""Find and snapshot the state that a training step may change: of its module, its batch and other objects.

A snapshot is an object of a `Kept...` class: it remembers one value, tells whether it has changed, and
restores it.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from lightning_memkit.micro_batching.changes import own_objects as own
from lightning_memkit.micro_batching.changes.array_walk import ArrayWalk
from lightning_memkit.micro_batching.changes.kept_classes import KeptClass, KeptClassAttributes
from lightning_memkit.micro_batching.changes.kept_contents import (
    BYTES,
    KeptCell,
    KeptGenerator,
    KeptLength,
    KeptSample,
)
from lightning_memkit.micro_batching.changes.kept_iterator import KeptIterator, is_iterator
from lightning_memkit.micro_batching.changes.kept_state import (
    Kept,
    KeptDict,
    KeptHooks,
    KeptItems,
    KeptSlots,
)
from lightning_memkit.micro_batching.changes.kept_tensor import KeptTensor, Place
from lightning_memkit.micro_batching.changes.sharded_state import are_sharded, shards_of
from lightning_memkit.micro_batching.changes.spare_copies import SpareCopies
from lightning_memkit.micro_batching.changes.step_changes import CONTAINERS, ChangeKind, label
from lightning_memkit.utilities.generators import GENERATORS

Keys = frozenset[tuple[str, str]]

OF_EVERY_MODULE = frozenset(nn.Module().__dict__) - {"training"}
_HOOKS = tuple(name for name in nn.Module().__dict__ if name.endswith("_hooks"))
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_PLAIN = frozenset(
    {int, float, str, bytes, bool, complex, type(None), torch.dtype, torch.device, torch.Size, type}
)
_BATCH_STATISTICS = nn.modules.batchnorm._NormBase


class StateWalk:
    """Collects snapshots of tensors and of all other state, in the order in which they are found.

    Args:
        module: the module that takes the step.
        changing: the tensors to clone; if None, buffers and attributes that are tensors.
        spares: copies of other tensors from earlier steps.
    """

    def __init__(self, module: nn.Module, changing: Keys | None, spares: SpareCopies | None = None) -> None:
        self._spares, self._arrays = spares, ArrayWalk(changing, spares)
        self._changing = changing
        self._modules: dict[str, nn.Module] = {}
        self._attributes: dict[str, dict[str, Any]] = {}
        self._kept: list[Kept] = []
        self._long: list[Kept] = []  # of those, the snapshots of long containers
        self._tensors: list[KeptTensor] = []
        self._seen: set[int] = set()
        self._metrics: list[str] = []
        self._objects = 0
        self._roots = own.roots_of(module)
        self._sharded = are_sharded(module)
        self._shards = shards_of(module) if self._sharded else {}

    def _keep_module(self, path: str, owner: nn.Module) -> None:
        if id(owner) in self._seen:
            return
        self._seen.add(id(owner))
        self._modules[path] = owner
        metric = self._metric_above(path, owner)
        kind: ChangeKind = "metric" if metric is not None else "attribute"
        place = Place(path=path, name="", kind=kind, said=metric or "")
        for name, value in vars(owner).items():
            if type(value) not in _PLAIN and name not in OF_EVERY_MODULE and is_iterator(value):
                one = Place(path=path, name=name, kind="object", said=metric or "")
                self._kept.append(KeptIterator(one, vars(owner), name))
        attributes = KeptDict(place, vars(owner), OF_EVERY_MODULE, attributes=True)
        self._kept += [KeptClass(place, owner), attributes]
        self._attributes[path] = attributes.items
        self._keep_tables(place, owner)
        # A first forward may register hooks and set a flag that it has. Restoring the flag but not the hooks
        # would register them twice.
        self._keep_hooks(place, {name: vars(owner).get(name) for name in _HOOKS})
        for name, value in attributes.items.items():
            if type(value) not in _PLAIN:
                self._keep_value(Place(path=path, name=name, kind=kind, said=metric or ""), value)
        self._keep_class_attributes(place, owner)

    def _metric_above(self, path: str, owner: nn.Module) -> str | None:
        """The path of the metric that `owner` is or belongs to; None if it belongs to none."""
        if own.is_metric(owner):
            self._metrics.append(path)
        return next((one for one in self._metrics if path == one or path.startswith(f"{one}.")), None)

    def _keep_tables(self, place: Place, owner: nn.Module) -> None:
        """Snapshot the tables of parameters, buffers and submodules, and the tensors in them."""
        buffers: ChangeKind = "batch_statistics" if isinstance(owner, _BATCH_STATISTICS) else "buffer"
        kinds: tuple[tuple[str, ChangeKind], ...] = (
            ("_parameters", "parameter"), ("_buffers", buffers), ("_modules", "attribute"),
        )  # fmt: skip
        for table, kind in kinds:
            values = vars(owner)[table]
            kind = "metric" if place.kind == "metric" else kind
            # FSDP2 itself replaces the entries of `_parameters` while it runs, and restores them.
            if not values or (self._sharded and table == "_parameters"):
                continue
            below = Place(path=place.path, name="", kind=kind, said=place.said)
            self._kept.append(KeptDict(below, values, attributes=True))
        for table, kind in kinds[:2]:
            for name, tensor in vars(owner)[table].items():
                # A gathered parameter is freed in the step and gathered again from its shard: keep the shard.
                tensor = self._shards.get((id(owner), name), tensor)
                if tensor is not None:
                    kind = "metric" if place.kind == "metric" else kind
                    self._keep_tensor(Place(path=place.path, name=name, kind=kind, said=place.said), tensor)

    def _keep_hooks(self, place: Place, tables: dict[str, Any]) -> None:
        """Snapshot tables of hooks, and the state that the user's hooks hold."""
        tables = {name: hooks for name, hooks in tables.items() if isinstance(hooks, dict)}
        if not tables:
            return
        self._kept.append(KeptHooks(place, tables.values()))
        for name, hooks in tables.items():
            for hook in hooks.values():
                self._keep_value(Place(path=place.path, name=f"{name}[...]", kind="object"), hook)

    def _keep_class_attributes(self, place: Place, owner: object) -> None:
        for kind in own.own_classes(owner, self._roots):
            if id(kind) in self._seen:
                continue
            self._seen.add(id(kind))
            items = own.class_attributes(kind)
            if items:
                self._kept.append(KeptClassAttributes(place, kind, items))
            for name, value in items.items():
                if type(value) not in _PLAIN:
                    self._keep_value(Place(path=kind.__name__, name=name, kind="attribute"), value)

    def _keep_value(self, place: Place, value: Any, depth: int = 0) -> None:
        """Snapshot any value that an attribute, a container or an object holds."""
        if type(value) in _PLAIN or depth > own.DEEPEST:
            return
        if isinstance(value, Tensor):
            self._keep_tensor(place, value)
        elif isinstance(value, (tuple, frozenset)):
            for index, item in enumerate(value if len(value) <= own.MOST_ITEMS else ()):
                self._keep_value(place.below(f"[{index}]"), item, depth + 1)
        elif id(value) in self._seen:
            return
        elif isinstance(value, nn.Module):
            for below, child in value.named_modules():
                self._keep_module(
                    ".".join(part for part in (label(place.path, place.name), below) if part), child
                )
        elif isinstance(value, (np.ndarray, *BYTES)):
            self._keep_array(place, value)
        elif isinstance(value, GENERATORS):
            self._seen.add(id(value))
            kind: ChangeKind = "generator" if place.kind == "attribute" else place.kind
            self._kept.append(KeptGenerator(place.of_kind(kind), value))
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
        if self._spares is not None and kept.copy is None and place.kind != "batch" and not _is_lazy(tensor):
            kept.spare = self._spares.of(tensor)
            kept.pair = None if kept.spare is None else self._spares.pair(tensor)
        if not _is_lazy(tensor):
            self._keep_hooks(place, {name: getattr(tensor, name, None) for name in _TENSOR_HOOKS})

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
                if type(item) not in _PLAIN:
                    self._keep_value(place.below(name), item, depth + 1)
        if type(value).__module__ not in ("builtins", "collections"):
            self._keep_attributes(place, value, depth)

    def _looks_into(self, container: Any) -> bool:
        """Whether the items of a container are recorded, too, not only the list of them."""
        return True

    def _keep_object(self, place: Place, value: Any, depth: int) -> None:
        """Snapshot a plain object of the user's, or a function with its closure and defaults."""
        if isinstance(value, type):
            return
        cells, carried = own.closure_of(value, self._roots)
        if cells or carried:
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
            self._kept.append(KeptDict(place, vars(value), attributes=True))
        if own.slots_of(type(value)):
            self._kept.append(KeptSlots(place, value))
        self._keep_class_attributes(place, value)
        for name, item in own.state_of(value).items():
            self._keep_value(place.below(f".{name}"), item, depth + 1)

    def _keep_function(
        self, place: Place, value: Any, cells: list[Any], carried: list[Any], depth: int
    ) -> None:
        if place.kind == "attribute":
            place = place.of_kind("object")
        self._seen.add(id(value))
        self._objects += 1
        names = getattr(getattr(value, "__code__", None), "co_freevars", ())
        for name, cell in zip(names, cells, strict=False):
            if id(cell) not in self._seen:
                self._seen.add(id(cell))
                one = KeptCell(place.below(f".{name}"), cell)
                self._kept.append(one)
                self._keep_value(one.place, one.content, depth + 1)
        for item in carried:
            self._keep_value(place, item, depth + 1)


def _named_items(container: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(container, dict):
        return [(f"[{key!r}]", item) for key, item in container.items()]
    return [(f"[{index}]", item) for index, item in enumerate(container)]


def _is_lazy(tensor: Tensor) -> bool:
    return isinstance(tensor, (UninitializedBuffer, UninitializedParameter))
