"""Find and snapshot the state that a training step may change: of its module, its batch and other objects."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memkit.micro_batching.changes import own_objects as own
from lightning_memkit.micro_batching.changes.kept_access import KeptScript, is_script
from lightning_memkit.micro_batching.changes.kept_classes import KeptClass
from lightning_memkit.micro_batching.changes.kept_state import Kept, KeptDict, KeptHooks
from lightning_memkit.micro_batching.changes.kept_states import KeptStates
from lightning_memkit.micro_batching.changes.kept_tensor import KeptTensor, Place
from lightning_memkit.micro_batching.changes.sharded_state import are_sharded, shards_of
from lightning_memkit.micro_batching.changes.spare_copies import SpareCopies
from lightning_memkit.micro_batching.changes.step_changes import ChangeKind
from lightning_memkit.micro_batching.changes.still_modules import StillModule, StillModules
from lightning_memkit.micro_batching.changes.value_walk import PLAIN_KINDS, Keys, ValueWalk
from lightning_memkit.optim.methods import uses_closure_its_own_way
from lightning_memkit.utilities.rewindable import make_rewindable

OF_EVERY_MODULE = frozenset(nn.Module().__dict__) - {"training"}
_HOOKS = tuple(name for name in nn.Module().__dict__ if name.endswith("_hooks"))
_BATCH_STATISTICS = nn.modules.batchnorm._NormBase


class StateWalk(ValueWalk):
    """Collects snapshots of a module's tensors and of all its other state.

    Args:
        module: the module that takes the step.
        changing: the tensors to clone; if None, buffers and attributes that are tensors.
        optimizers: the run's own optimizers, by name.
        spares: from earlier steps, copies of other tensors and snapshots of modules.
    """

    def __init__(
        self,
        module: nn.Module,
        changing: Keys | None,
        optimizers: Mapping[str, Optimizer] = MappingProxyType({}),
        spares: SpareCopies | None = None,
    ) -> None:
        apart = [part for one in optimizers.values() for part in (one, one.state, one.param_groups)]
        super().__init__(own.roots_of(module), changing, apart, spares)
        self._modules: dict[str, nn.Module] = {}
        self._attributes: dict[str, dict[str, Any]] = {}
        self._metrics: list[str] = []
        self._states: list[KeptStates] = []
        self._still: StillModules = {}
        self._sharded = are_sharded(module)
        self._shards = shards_of(module) if self._sharded else {}

    @override
    def _keep_module(self, path: str, owner: nn.Module) -> None:
        if id(owner) in self._seen:
            return
        self._seen.add(id(owner))
        self._modules[path] = owner
        still = None if self._spares is None else self._spares.modules.get(path)
        if still is not None and still.stands_for(owner):
            self._take_over(path, still)
        else:
            self._walk_module(path, owner)

    def _take_over(self, path: str, still: StillModule) -> None:
        """Keep what an earlier step has kept of a module, and its tensors as they are now."""
        self._still[path] = still
        self._kept += still.kept
        self._attributes[path] = still.attributes.items
        for place, tensor in still.tensors:
            self._keep_tensor(place, tensor)

    def _walk_module(self, path: str, owner: nn.Module) -> None:
        metric = self._metric_above(path, owner)
        kind: ChangeKind = "metric" if metric is not None else "attribute"
        place = Place(path=path, name="", kind=kind, said=metric or "")
        make_rewindable(vars(owner))
        attributes = KeptDict(place, vars(owner), OF_EVERY_MODULE, attributes=True)
        kept: list[Kept] = [KeptClass(place, owner), attributes, *self._kept_tables(place, owner)]
        self._kept += kept
        self._attributes[path] = attributes.items
        tensors = list(self._tensors_in(place, owner))
        for where, tensor in tensors:
            self._keep_tensor(where, tensor)
        # A first forward may register hooks and set a flag that it has. Restoring the flag but not the hooks
        # would register them twice.
        hooks, begun = {name: vars(owner).get(name) for name in _HOOKS}, len(self._kept)
        self._keep_hooks(place, hooks)
        kept += self._kept[begun:]
        for name, value in attributes.items.items():
            if type(value) not in PLAIN_KINDS:
                self._keep_value(Place(path=path, name=name, kind=kind, said=metric or ""), value)
        self._keep_class_attributes(place, type(owner))
        if is_script(owner):
            self._kept.append(KeptScript(place, owner))
        if metric is None and not self._sharded and self._holds_plain_values(owner, attributes, hooks):
            self._still[path] = StillModule(owner, attributes, kept, tensors)

    def _holds_plain_values(self, owner: nn.Module, attributes: KeptDict, hooks: Mapping[str, Any]) -> bool:
        """Whether all state of a module's lies in its tables, its plain values and other modules."""
        if is_script(owner) or any(own.own_classes(type(owner), self._roots)):
            return False
        if not all(map(_is_plain, attributes.items.values())):
            return False
        held = (hook for table in hooks.values() if table for hook in table.values())
        return all(own.is_memkits_hook(hook) for hook in held)

    def _keep_optimizers(self, optimizers: Mapping[str, Optimizer]) -> None:
        """Snapshot the settings and, without copies, the states of the run's own optimizers."""
        for name, optimizer in optimizers.items():
            for number, group in enumerate(optimizer.param_groups):
                place = Place(path="", name=f"{name}.param_groups[{number}]", kind="object")
                self._keep_value(place, group)
            # Its own way to its closure: the states change within the step, which is journaled with all of them.
            if self._changing is None or not uses_closure_its_own_way(optimizer):
                self._keep_states(f"{name}.state", optimizer.state)

    def _keep_states(self, name: str, owner: dict[Any, Any]) -> None:
        states = KeptStates(Place(path="", name=name, kind="optimizer_state"), owner, self._tensors)
        self._states.append(states)
        self._kept.append(states)
        names = None
        if self._changing is not None:
            names = frozenset(known for _, known in self._changing if known.startswith(name))
        if names is None or names:
            # In a trial, tensors are copied when they are first written to; in a step, those that steps write to.
            for place, tensor in states.take_tensors(names):
                self._tensors.append(KeptTensor(place, tensor, cloned=names is not None))

    def _metric_above(self, path: str, owner: nn.Module) -> str | None:
        """The path of the metric that `owner` is or belongs to; None if it belongs to none."""
        if own.is_metric(owner):
            self._metrics.append(path)
        return next((one for one in self._metrics if path == one or path.startswith(f"{one}.")), None)

    def _kept_tables(self, place: Place, owner: nn.Module) -> Iterator[Kept]:
        """Snapshots of the tables of parameters, buffers and submodules, without the tensors in them."""
        empty = list[dict[str, Any]]()
        for table, kind in self._tables_of(place, owner):
            values = vars(owner)[table]
            if not values and (table != "_buffers" or not isinstance(values, dict)):  # a scripted module's
                empty.append(values)  # what a first step registers there is removed
                continue
            # FSDP2 itself replaces the entries of `_parameters` while it runs, and restores them.
            if self._sharded and table == "_parameters":
                continue
            below = Place(path=place.path, name="", kind=kind, said=place.said)
            yield KeptDict(below, values, attributes=True)
        if empty:
            yield KeptHooks(place, empty)

    def _tensors_in(self, place: Place, owner: nn.Module) -> Iterator[tuple[Place, Tensor]]:
        """The parameters and buffers of a module, and where they are."""
        for table, kind in self._tables_of(place, owner)[:2]:
            for name, tensor in vars(owner)[table].items():
                # A gathered parameter is freed in the step and gathered again from its shard: keep the shard.
                tensor = self._shards.get((id(owner), name), tensor)
                if tensor is not None:
                    yield Place(path=place.path, name=name, kind=kind, said=place.said), tensor

    def _tables_of(self, place: Place, owner: nn.Module) -> tuple[tuple[str, ChangeKind], ...]:
        """The names of a module's tables, and the kind of a change in each."""
        buffers: ChangeKind = "batch_statistics" if isinstance(owner, _BATCH_STATISTICS) else "buffer"
        kinds: tuple[tuple[str, ChangeKind], ...] = (
            ("_parameters", "parameter"), ("_buffers", buffers), ("_modules", "attribute"),
        )  # fmt: skip
        return tuple((table, "metric" if place.kind == "metric" else kind) for table, kind in kinds)


def _is_plain(value: object) -> bool:
    """Whether it is, or is a tuple of, values that nothing can change in place."""
    return type(value) in PLAIN_KINDS or (type(value) is tuple and all(map(_is_plain, value)))
