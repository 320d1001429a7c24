"""Snapshot of a tensor before a step, and the place where it was found."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from lightning_memkit.micro_batching.changes.alike import alike, same_bits
from lightning_memkit.micro_batching.changes.step_changes import ChangeKind, StepChange, label
from lightning_memkit.micro_batching.changes.tensor_attributes import attributes_of
from lightning_memkit.utilities.tensors import is_wrapper, storage_is_freed

LAZY = (UninitializedBuffer, UninitializedParameter)
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_FLAG = ".requires_grad"
_REGISTERED = ("parameter", "buffer", "batch_statistics")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a value is (a module's path and the name below it), and how its change is reported.

    Attributes:
        path: the module's path.
        name: the attribute's name, with keys and indices below it; empty for the module itself.
        kind: the kind of a change of it.
        said: the name to report instead of its own (a metric's, for all that the metric holds).
    """

    path: str
    name: str
    kind: ChangeKind
    said: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """The identifier that `Rollback.changed` returns for it."""
        return self.path, self.name

    def below(self, suffix: str) -> "Place":
        """The place of something that the value holds."""
        return replace(self, name=self.name + suffix)

    def of_kind(self, kind: ChangeKind) -> "Place":
        """The same place, where changes are of another kind."""
        return self if kind == self.kind else replace(self, kind=kind)

    def of_attributes(self) -> "Place":
        """The place of the attributes of a tensor that is here: no parameter or buffer itself."""
        return self.of_kind("attribute") if self.kind in _REGISTERED else self

    def change(self, suffix: str = "", kind: ChangeKind | None = None) -> StepChange:
        """A change of the value, or of what it holds under `suffix`."""
        own = kind if kind is not None and self.kind == "attribute" else self.kind
        return StepChange(kind=own, name=self.said or label(self.path, self.name + suffix))


class KeptTensor:
    """Snapshot of a tensor, with a copy only on request; its version counter tells whether it was written to.

    Attributes:
        alias: shares the tensor's storage and keeps it alive, even if the tensor gets another one
            (`p.data = ...`).
        copy: the values of the snapshot; None if they were not copied.
        is_bare: it held no attributes of the user's. (What others hold is kept as that of any object.)
        version: the version at the snapshot; None if writes don't count as the step's (any more).
    """

    def __init__(self, place: Place, tensor: Tensor, *, cloned: bool) -> None:
        self.place, self.tensor = place, tensor
        self.spare: Tensor | None = None  # values of the snapshot, copied in an earlier step
        # Its bits and those of `spare`, to be compared in every step.
        self.pair: tuple[Tensor, Tensor] | None = None
        self.was_copied = False  # by a `CopyOnWrite`, because an operator was about to write to it
        # Most tensors hold no attributes: these need no snapshot, as long as none is set.
        self.is_bare = not tensor.__dict__ or not attributes_of(tensor)
        self._held = len(tensor.__dict__)  # torch's own
        self._kind = type(tensor)
        with torch._C.DisableTorchFunctionSubclass():
            self.alias = tensor.data
            counts = not tensor.is_inference()  # inference tensors have no version counter
            self.version: int | None = None if self.uninitialized else tensor._version if counts else 0
            self._requires_grad = tensor.requires_grad if tensor.is_leaf else None
            self._without_hooks = self._hookless()
            wanted = (cloned or not counts) and not self.uninitialized and not storage_is_freed(self.alias)
            with torch.inference_mode(not counts):
                self.copy = self.alias.detach().clone() if wanted else None
            self._address = _address_of(tensor) if counts and not self.uninitialized else None

    def _hookless(self) -> tuple[str, ...]:
        """The kinds of hooks of which the tensor has no table yet; its first hook makes one."""
        if issubclass(self._kind, LAZY):
            return ()
        return tuple(name for name in TENSOR_HOOKS if getattr(self.tensor, name, None) is None)

    @property
    def gets_gradients(self) -> bool:
        """Whether gradients are accumulated in it, or may be once it is no longer frozen."""
        return self._requires_grad is True or isinstance(self.tensor, nn.Parameter)

    @property
    def was_frozen(self) -> bool:
        """Whether its `requires_grad` is another one now."""
        tensor = self.tensor
        return (
            self._requires_grad is not None and tensor.is_leaf and tensor.requires_grad != self._requires_grad
        )

    @property
    def uninitialized(self) -> bool:
        """Whether it belonged to a lazy module and had no shape yet."""
        return issubclass(self._kind, LAZY)

    @property
    def was_freed(self) -> bool:
        """Whether its storage was freed, so that its owner will fill it again."""
        return not self.uninitialized and (storage_is_freed(self.alias) or storage_is_freed(self.tensor))

    @property
    def was_written(self) -> bool:
        """Whether it was written to, by its version counter."""
        tensor = self.tensor
        return self.version is not None and not tensor.is_inference() and tensor._version != self.version

    @property
    def was_written_unseen(self) -> bool:
        """Whether it was written to past its version counter (through `.data`), as far as values are compared."""
        return self.pair is not None and self.version is not None and not torch.equal(*self.pair)

    @property
    def was_replaced(self) -> bool:
        """Whether it has another storage, shape or class now."""
        if self._kind is not type(self.tensor):
            return True
        alias = self.alias
        if self.uninitialized or is_wrapper(alias) or alias.layout is not torch.strided:
            return False
        if storage_is_freed(alias):
            return False
        tensor = self.tensor
        return (
            tensor.untyped_storage()._cdata != alias.untyped_storage()._cdata or tensor.shape != alias.shape
        )

    @property
    def was_set(self) -> bool:
        """Whether it was written to or replaced, even by equal values; False if it was freed since."""
        written = self.was_written or self.was_copied or self.was_replaced or self.was_written_unseen
        return written and not self.was_freed

    @property
    def differs(self) -> bool:
        """Whether its values differ from the snapshot's; without a copy, whether it was written to or has others."""
        if self._kind is not type(self.tensor):
            return True
        if self.was_freed:
            return False
        if self.copy is None:
            written = self.was_written or self.was_written_unseen
            return written or (self.was_replaced and not alike(self.alias, self.tensor.data))
        return not alike(self.copy, self.tensor.data)

    @property
    def is_lost(self) -> bool:
        """Whether it was written to, and can't be restored because it was not copied."""
        kept = self.copy is not None or self.spare is not None
        return not kept and self.was_written and not self.was_replaced and not self.was_freed

    def moved(self) -> Iterator[StepChange]:
        """A change if it was written to, replaced or frozen, by counter, address and flag: no look at all values."""
        if self.is_still:
            return
        if self.was_set:
            yield self.place.change()
        if self.was_frozen:
            yield self.place.change(_FLAG)
        yield from self._gained()

    @property
    def is_still(self) -> bool:
        """Whether its counter, address and flag are those of the snapshot, and values need no look."""
        if self.was_frozen or self._has_gained:
            return False
        if self.version is None:
            return True
        tensor, address = self.tensor, self._address
        if address is None or tensor._version != self.version or tensor.data_ptr() != address:
            return False
        return self.pair is None or torch.equal(*self.pair)

    def changes(self) -> Iterator[StepChange]:
        """A change if it differs; of some kinds any write: an average may start as a copy, and moments as zeros."""
        if self.copy is None and not self.was_copied and self.version is not None and self.is_still:
            return
        by_writes = self.place.kind in ("parameter", "buffer", "optimizer_state")
        if (by_writes and self.was_set) or self.differs:
            yield self.place.change()
        if self.was_frozen:
            yield self.place.change(_FLAG)
        yield from self._gained()

    @property
    def _has_gained(self) -> bool:
        """Whether a tensor without attributes may have some now."""
        return self.is_bare and len(self.tensor.__dict__) != self._held

    def _gained(self) -> Iterator[StepChange]:
        if self._has_gained:
            place = self.place.of_attributes()
            yield from (place.change(f".{name}") for name in attributes_of(self.tensor))

    def now(self, change: StepChange) -> Any:
        """The current values, the flag `requires_grad`, or the attribute that is named."""
        if self._has_gained and change != self.place.change():
            place = self.place.of_attributes()
            for name, value in attributes_of(self.tensor).items():
                if place.change(f".{name}") == change:
                    return {name: value}
        return self.tensor.requires_grad if change.name.endswith(_FLAG) else self.tensor.data

    def before(self, now: Any) -> Any:
        """The values of the snapshot; if they were not copied, the current ones."""
        if isinstance(now, bool):
            return self._requires_grad
        if isinstance(now, dict):
            return None
        return self.alias if self.copy is None else self.copy

    def restore(self) -> None:
        """Restore its class, hooks, `requires_grad`, storage and, if they were copied, its values.

        Attributes of a tensor that had none are removed.
        """
        tensor = self.tensor
        if self._has_gained:
            for name in attributes_of(tensor):
                del vars(tensor)[name]
        for name in self._without_hooks:
            hooks = getattr(tensor, name, None)
            if hooks:
                hooks.clear()  # the table itself stays: autograd calls what is in it
        replaced = self.was_replaced
        if self.copy is None and (self.was_written or self.was_written_unseen):
            self.copy = self.spare
        with torch._C.DisableTorchFunctionSubclass():
            if self._kind is not type(tensor):
                tensor.__class__ = self._kind
            if replaced:
                tensor.data = self.alias
            if self.was_frozen:
                tensor.requires_grad_(bool(self._requires_grad))
        if self.copy is not None and not self.was_freed and not same_bits(self.copy, self.alias):
            with torch.inference_mode(self.alias.is_inference()), torch.no_grad():
                self.alias.copy_(self.copy) if replaced else tensor.copy_(self.copy)
        if self.version is not None and not tensor.is_inference():
            self.version = tensor._version


def _address_of(tensor: Tensor) -> int | None:
    """Where its values lie; None for a tensor that has no address, or one for each shard."""
    if is_wrapper(tensor) or tensor.layout is not torch.strided:
        return None
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a fake tensor
        return None
