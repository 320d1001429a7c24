"""Undo what a training step changes besides gradients and the optimizer, and report what it was."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from lightning_memkit.memory.out_of_memory import is_out_of_memory
from lightning_memkit.micro_batching.changes.composition import Left, left_behind
from lightning_memkit.micro_batching.changes.copy_on_write import CopyOnWrite
from lightning_memkit.micro_batching.changes.kept_access import KeptCache
from lightning_memkit.micro_batching.changes.kept_classes import KeptClass
from lightning_memkit.micro_batching.changes.kept_contents import (
    KeptArray,
    KeptBytes,
    KeptLength,
    KeptSample,
)
from lightning_memkit.micro_batching.changes.kept_state import Kept, KeptHooks
from lightning_memkit.micro_batching.changes.kept_tensor import KeptTensor, Place
from lightning_memkit.micro_batching.changes.spare_copies import SpareCopies
from lightning_memkit.micro_batching.changes.state_walk import OF_EVERY_MODULE, StateWalk
from lightning_memkit.micro_batching.changes.step_changes import StepChange, label
from lightning_memkit.micro_batching.changes.value_walk import Keys
from lightning_memkit.utilities.generators import Generators

# What micro-batches may change: each its own rows; and batch statistics, which a warning names.
_NO_STATE = ("batch", "batch_statistics")
_TELL_NOTHING = (KeptCache, KeptClass, KeptHooks)


class Rollback(StateWalk):
    """Snapshot of a module's mutable state before a step, restored exactly if the step fails or was a trial.

    It covers the global random generators, and the parameters, buffers, hooks and attributes of every
    submodule with what they hold at any depth: lists, dicts, sets, deques, arrays, generators, iterators,
    `torchmetrics` states, closure variables and attributes of functions, the user's classes and objects of these,
    optimizers and schedulers of the module's own, queues, positions of files. The batch is covered in the same
    way.

    Not covered: what the items of containers with more than 10,000 items hold (which items these are is
    restored; with `changing`, only in the containers that it names, and elsewhere what a list has gained is
    removed), objects beyond 20,000 in all or 24 levels deep; the Trainer, loggers, data frames and other
    libraries' objects, unless these hold tensors or nothing but plain values; variables of Python modules.

    Without `changing`, buffers and attributes that are tensors are cloned. Parameters, and tensors at deeper
    levels, are copied to the host when an operator first writes to them, if the step runs within
    `watching()`. With `changing`, only the tensors that it names are cloned, because clones of all weights in
    every step would cost more memory than micro-batches save.

    Of the run's optimizers, the settings are restored, and which states they have; with `changing`, of these states'
    tensors only those that it names, which the step or a hook was seen to change. A change of the others is told by
    their version counters.

    With `spares`, a module that holds nothing but tensors and plain values is not walked over again while these
    are the same objects, and small tensors and arrays that no earlier step has changed are restored from copies
    made once. Not seen are writes past a version counter (`.data`) on an accelerator or of more than 16 KiB, and
    changes of few items of an array of more than 256 KiB.

    Args:
        module: the module that takes the step.
        changing: the results of `changed()` of earlier rollbacks: the tensors that steps change in place.
        batches: the step's micro-batch, and the batch that contains it.
        beside: by name, other objects that the step's hooks change.
        optimizers: the run's own optimizers, by name: of these the settings and what states there are.
        spares: copies from earlier steps of small tensors that no step has changed, for one that is the first to.
    """

    def __init__(
        self,
        module: nn.Module,
        changing: Keys | None = None,
        *,
        batches: Sequence[Any] = (),
        beside: Mapping[str, Any] | None = None,
        optimizers: Mapping[str, Optimizer] = MappingProxyType({}),
        spares: SpareCopies | None = None,
    ) -> None:
        self._random = Generators()
        super().__init__(module, changing, optimizers, spares)
        self._root = module
        self._lost_before: set[tuple[str, str]] = set()
        self._mode: CopyOnWrite | None = None
        self._uncloned: list[KeptTensor] = []
        self._watched: list[Kept] | None = None  # without those that tell no change
        for path, owner in module.named_modules():
            self._keep_module(path, owner)
        if spares is not None:
            spares.modules = self._still
        for batch in batches:
            self._keep_value(Place(path="batch", name="", kind="batch"), batch)
        self._keep_optimizers(optimizers)
        self._of_step = len(self._tensors), len(self._kept)
        for name, value in (beside or {}).items():
            self._keep_given(Place(path="", name=name, kind="object"), value)

    def leaves(self) -> list[Tensor]:
        """The tensors that get gradients: the module's parameters, and what else its state holds."""
        if self._sharded:  # the walk has found shards, which get no gradients
            return list(self._root.parameters())
        return [one.tensor for one in self._tensors if one.gets_gradients]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context in which tensors that were not cloned are copied to the host before they are written to.

        Compiled functions run eagerly in it.
        """
        self._uncloned = [one for one in self._tensors if one.copy is None and not one.uninitialized]
        self._mode = CopyOnWrite(one.alias for one in self._uncloned)
        try:
            with self._mode:
                yield
        finally:
            self._collect()
            self._mode, self._uncloned = None, []

    def _collect(self) -> None:
        """Take over the copies made so far."""
        if self._mode is not None:
            for one in self._uncloned:
                one.copy = self._mode.copies.get(id(one.alias))
                one.was_copied = one.copy is not None

    def changed(self) -> Keys:
        """The tensors, arrays, bytes and long containers whose values have changed since.

        Parameters and buffers count as changed also if they were written to or replaced with equal values, and tensors
        for whose comparison there is no memory.
        """
        self._collect()
        # A trial asks within its modes, which make an operator five times as dear.
        with _disable_current_modes():
            tensors = {one.place.key for one in self._tensors if _has_changed(one)}
            arrays = (one for one in self._kept if isinstance(one, (KeptArray, KeptBytes)))
            others = {one.place.key for one in (*arrays, *self._long) if any(one.changes())}
        return frozenset(tensors) | others | self._lost_before

    def changes(self) -> tuple[StepChange, ...]:
        """All values that differ from the snapshot's; and parameters and buffers that were set to equal values."""
        self._collect()
        with _disable_current_modes():
            found = {change: None for one in (*self._tensors, *self._kept) for change in one.changes()}
        return tuple(found)

    def touched(self) -> frozenset[str]:
        """The names of all that was written to, or is another object than before, whatever its value.

        Cheap enough for every step. The batch, running averages, and what is `beside` are not among them.
        """
        tensors, kept = self._of_step
        if self._watched is None:
            self._watched = [one for one in self._kept[:kept] if not isinstance(one, _TELL_NOTHING)]
        moved: list[Kept | KeptTensor] = [one for one in self._tensors[:tensors] if not one.is_still]
        moved += [one for one in self._watched if not one.is_still]
        found = (change for one in moved for change in one.moved())
        return frozenset(change.name for change in found if change.kind not in _NO_STATE)

    def tensors_of(self, names: frozenset[str]) -> list[Tensor]:
        """The tensors whose changes have these names."""
        return [one.tensor for one in self._tensors if one.place.change().name in names]

    def left_behind(self) -> Left:
        """The values that the step has left in what it changed, to be compared by `compose`."""
        self._collect()
        return left_behind([*self._tensors, *self._kept])

    def replaced(self) -> list[str]:
        """The attributes that were assigned since and hold tensors: state that steps hand on."""
        return [
            label(path, key)
            for path, before in self._attributes.items()
            for key, value in vars(self._modules[path]).items()
            if key not in OF_EVERY_MODULE and value is not before.get(key) and _holds_tensors(value)
        ]

    def uninitialized(self) -> frozenset[str]:
        """The paths of lazy modules, whose parameters get their shapes in the first forward."""
        return frozenset(one.place.path for one in self._tensors if one.uninitialized)

    def optimizer_steps(self) -> Keys:
        """Stop counting writes to parameters: the optimizer steps now.

        Returns:
            The tensors, and the long containers, that were changed before.
        """
        # By version counters: comparing values takes memory, and there may be none left.
        changed = frozenset(
            one.place.key for one in self._tensors if one.was_written or one.was_written_unseen
        )
        for one in self._tensors:
            if one.copy is None and isinstance(one.tensor, nn.Parameter):
                if one.is_lost:
                    self._lost_before.add(one.place.key)
                one.version = None
        for states in self._states:
            written = states.written()
            self._lost_before |= written
            changed |= written
            states.optimizer_steps()
        return changed | {one.place.key for one in self._uncopied() if any(one.changes())}

    def put_batch_back(self) -> None:
        """Write into the batch what it held before the step has changed it in place."""
        for one in self._batch_tensors():
            if one.copy is not None and one.differs:
                with torch.no_grad():
                    one.tensor.copy_(one.copy)

    @property
    def has_lost_batch(self) -> bool:
        """Whether the step was the first to change the batch in place, which therefore was not copied."""
        return any(one.is_lost for one in self._batch_tensors())

    def _batch_tensors(self) -> list[KeptTensor]:
        return [one for one in self._tensors[: self._of_step[0]] if one.place.kind == "batch"]

    def _uncopied(self) -> list[KeptLength | KeptSample]:
        """The snapshots of long containers whose items were not copied, and of large arrays."""
        return [one for one in self._long if isinstance(one, (KeptLength, KeptSample))]

    def restore(self, *, but: frozenset[str] = frozenset()) -> Keys:
        """Restore everything, except in the modules at the paths in `but`.

        Returns:
            The tensors, long containers and large arrays that were seen to change but were not copied.
        """
        unkept = [*self._tensors, *self._uncopied()]
        lost = {one.place.key for one in unkept if one.is_lost} | self._lost_before
        lost = lost.union(*(states.written() for states in self._states))
        self._lost_before = set()
        for one in (*self._kept, *self._tensors):
            if one.place.path not in but:
                one.restore()
        self._random.restore()
        return frozenset(lost)


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))


def _has_changed(one: KeptTensor) -> bool:
    try:
        return any(one.changes())
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            return True
        raise
