"""Find and snapshot the state that a training step may change: of its module, its batch and other objects."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memkit.micro_batching.changes import own_objects as own
from lightning_memkit.micro_batching.changes.kept_access import KeptScript, is_script
from lightning_memkit.micro_batching.changes.kept_classes import KeptClass
from lightning_memkit.micro_batching.changes.kept_state import KeptDict, KeptHooks
from lightning_memkit.micro_batching.changes.kept_states import KeptStates
from lightning_memkit.micro_batching.changes.kept_tensor import KeptTensor, Place
from lightning_memkit.micro_batching.changes.sharded_state import are_sharded, shards_of
from lightning_memkit.micro_batching.changes.spare_copies import SpareCopies
from lightning_memkit.micro_batching.changes.step_changes import ChangeKind
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
        spares: copies of other tensors from earlier steps.
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
        self._sharded = are_sharded(module)
        self._shards = shards_of(module) if self._sharded else {}

    @override
    def _keep_module(self, path: str, owner: nn.Module) -> None:
        if id(owner) in self._seen:
            return
        self._seen.add(id(owner))
        self._modules[path] = owner
        metric = self._metric_above(path, owner)
        kind: ChangeKind = "metric" if metric is not None else "attribute"
        place = Place(path=path, name="", kind=kind, said=metric or "")
        make_rewindable(vars(owner))
        attributes = KeptDict(place, vars(owner), OF_EVERY_MODULE, attributes=True)
        self._kept += [KeptClass(place, owner), attributes]
        self._attributes[path] = attributes.items
        self._keep_tables(place, owner)
        # A first forward may register hooks and set a flag that it has. Restoring the flag but not the hooks
        # would register them twice.
        self._keep_hooks(place, {name: vars(owner).get(name) for name in _HOOKS})
        for name, value in attributes.items.items():
            if type(value) not in PLAIN_KINDS:
                self._keep_value(Place(path=path, name=name, kind=kind, said=metric or ""), value)
        self._keep_class_attributes(place, type(owner))
        if is_script(owner):
            self._kept.append(KeptScript(place, owner))

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

    def _keep_tables(self, place: Place, owner: nn.Module) -> None:
        """Snapshot the tables of parameters, buffers and submodules, and the tensors in them."""
        buffers: ChangeKind = "batch_statistics" if isinstance(owner, _BATCH_STATISTICS) else "buffer"
        kinds: tuple[tuple[str, ChangeKind], ...] = (
            ("_parameters", "parameter"), ("_buffers", buffers), ("_modules", "attribute"),
        )  # fmt: skip
        empty = list[dict[str, Any]]()
        for table, kind in kinds:
            values = vars(owner)[table]
            kind = "metric" if place.kind == "metric" else kind
            if not values and (table != "_buffers" or not isinstance(values, dict)):  # a scripted module's
                empty.append(values)  # what a first step registers there is removed
                continue
            # FSDP2 itself replaces the entries of `_parameters` while it runs, and restores them.
            if self._sharded and table == "_parameters":
                continue
            below = Place(path=place.path, name="", kind=kind, said=place.said)
            self._kept.append(KeptDict(below, values, attributes=True))
        if empty:
            self._kept.append(KeptHooks(place, empty))
        for table, kind in kinds[:2]:
            for name, tensor in vars(owner)[table].items():
                # A gathered parameter is freed in the step and gathered again from its shard: keep the shard.
                tensor = self._shards.get((id(owner), name), tensor)
                if tensor is not None:
                    kind = "metric" if place.kind == "metric" else kind
                    self._keep_tensor(Place(path=place.path, name=name, kind=kind, said=place.said), tensor)
