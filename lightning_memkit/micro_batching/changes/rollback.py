"""Put back all that a training step changes besides gradients and the optimizer; say what it was."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_memkit.micro_batching.changes.composition import Left, left_behind
from lightning_memkit.micro_batching.changes.copy_on_write import CopyOnWrite
from lightning_memkit.micro_batching.changes.kept_contents import KeptArray, KeptBytes
from lightning_memkit.micro_batching.changes.kept_state import KeptLength
from lightning_memkit.micro_batching.changes.kept_tensor import KeptTensor, Place
from lightning_memkit.micro_batching.changes.state_walk import OF_EVERY_MODULE, Keys, StateWalk
from lightning_memkit.micro_batching.changes.step_changes import StepChange, label
from lightning_memkit.utilities.generators import Generators


class Rollback(StateWalk):
    """A module's mutable state before a step, to be put back exactly if the step fails or was a trial.

    It holds the global RNG; parameters, buffers, hooks and attributes of every submodule, with what they hold at any
    depth: lists, dicts, sets, deques, arrays, generators, `torchmetrics` states, functions' variables, and plain
    objects of the user's own classes. A batch is looked into likewise.

    Not looked into: containers of more than 10,000 items (they get their items back, the items are left alone),
    more than 20,000 objects in all, 24 levels; the Trainer, loggers, data sets, optimizers and other libraries'
    objects, unless these hold tensors; variables of Python modules.

    Without `changing` buffers and attributes that are tensors are cloned; parameters, and tensors that lie deeper, are
    copied to the host when something first writes to them, if the step runs within `watching()`. With `changing` only
    the tensors that it names are cloned: cloning every weight at every step would cost what it saves.

    Args:
        module: the module that steps.
        changing: what `changed()` of earlier rollbacks gave: the tensors that steps do change in place.
        batches: what the step is given, and what that is a part of.
        beside: by name, other objects that the step's hooks change.
    """

    def __init__(
        self,
        module: nn.Module,
        changing: Keys | None = None,
        *,
        batches: Sequence[Any] = (),
        beside: Mapping[str, Any] | None = None,
    ) -> None:
        self._random = Generators()
        super().__init__(module, changing)
        self._lost_before: set[tuple[str, str]] = set()
        self._mode: CopyOnWrite | None = None
        self._uncloned: list[KeptTensor] = []
        for path, owner in module.named_modules():
            self._keep_module(path, owner)
        for batch in batches:
            self._keep_value(Place(path="batch", name="", kind="batch"), batch)
        for name, value in (beside or {}).items():
            self._keep_given(Place(path="", name=name, kind="object"), value)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it operators copy to the host what they are about to write to and was not cloned.

        Compiled functions run eagerly.
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
        """Take over what has been copied so far."""
        if self._mode is not None:
            for one in self._uncloned:
                one.copy = self._mode.copies.get(id(one.alias))
                one.was_copied = one.copy is not None

    def changed(self) -> Keys:
        """The tensors and arrays that were changed in place, or replaced, since; to their old values, too."""
        self._collect()
        tensors = {one.place.key for one in self._tensors if any(one.changes())}
        arrays = (one for one in self._kept if isinstance(one, (KeptArray, KeptBytes, KeptLength)))
        return (
            frozenset(tensors) | {one.place.key for one in arrays if any(one.changes())} | self._lost_before
        )

    def changes(self) -> tuple[StepChange, ...]:
        """All that is not as it was, by value: what was set to what it had been is not in."""
        self._collect()
        found = {change: None for one in (*self._tensors, *self._kept) for change in one.changes()}
        return tuple(found)

    def left_behind(self) -> Left:
        """What the step has left in the place of what it changed, to be compared by `compose`."""
        self._collect()
        return left_behind([*self._tensors, *self._kept])

    def replaced(self) -> list[str]:
        """The attributes that were set since, and hold tensors: what a step hands on to the next."""
        return [
            label(path, key)
            for path, before in self._attributes.items()
            for key, value in vars(self._modules[path]).items()
            if key not in OF_EVERY_MODULE and value is not before.get(key) and _holds_tensors(value)
        ]

    def uninitialized(self) -> frozenset[str]:
        """The paths of lazy modules, which are given shapes by their first forward."""
        return frozenset(one.place.path for one in self._tensors if one.uninitialized)

    def optimizer_steps(self) -> Keys:
        """From here on parameters change by the optimizer's doing; returns the tensors that changed before."""
        # By versions: comparing values takes memory, of which there may be none left.
        changed = frozenset(one.place.key for one in self._tensors if one.was_written)
        for one in self._tensors:
            if one.copy is None and isinstance(one.tensor, nn.Parameter):
                if one.is_lost:
                    self._lost_before.add(one.place.key)
                one.version = None
        return changed

    def restore(self, *, but: frozenset[str] = frozenset()) -> Keys:
        """Put everything back, except in the modules of some paths.

        Returns:
            The tensors that changed but were not cloned; empty: it is exact.
        """
        lost = {one.place.key for one in self._tensors if one.is_lost} | self._lost_before
        self._lost_before = set()
        for one in (*self._kept, *self._tensors):
            if one.place.path not in but:
                one.restore()
        self._random.restore()
        return frozenset(lost)


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
