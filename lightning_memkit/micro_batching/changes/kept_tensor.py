"""A tensor as it was before a step, and where it is."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_memkit.memory.meter import storage_is_freed
from lightning_memkit.micro_batching.changes.alike import alike, same_bits
from lightning_memkit.micro_batching.changes.step_changes import ChangeKind, StepChange, label


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a value is: a module's path and the name below it; and what is said of it where it changes.

    Attributes:
        path: the module's.
        name: of an attribute, with keys and indices below it; empty for the module itself.
        kind: of the change.
        said: the name to say instead of its own (a metric's, for all that it holds).
    """

    path: str
    name: str
    kind: ChangeKind
    said: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """What `Rollback.changed` gives."""
        return self.path, self.name

    def change(self, suffix: str = "", kind: ChangeKind | None = None) -> StepChange:
        """The change of the value, or of what it holds under a suffix."""
        own = kind if kind is not None and self.kind == "attribute" else self.kind
        return StepChange(kind=own, name=self.said or label(self.path, self.name + suffix))


class KeptTensor:
    """A tensor, without a copy where that is not asked for: its version tells whether it was written to.

    Attributes:
        alias: shares the tensor's storage, and keeps it, whatever the tensor is given instead (`p.data = ...`).
        copy: what it held, None where that is not known.
        version: None where writing to it is not the step's doing any more.
    """

    def __init__(self, place: Place, tensor: Tensor, *, cloned: bool) -> None:
        self.place, self.tensor = place, tensor
        self.was_copied = False  # by a `CopyOnWrite`, as something wrote to it
        self._kind = type(tensor)
        with torch._C.DisableTorchFunctionSubclass():
            self.alias = tensor.data
            counts = not tensor.is_inference()  # such tensors count no versions
            self.version: int | None = None if self.uninitialized else tensor._version if counts else 0
            wanted = (cloned or not counts) and not self.uninitialized and not storage_is_freed(self.alias)
            with torch.inference_mode(not counts):
                self.copy = self.alias.detach().clone() if wanted else None

    @property
    def uninitialized(self) -> bool:
        """Whether it was a lazy module's, which had no shape yet."""
        return issubclass(self._kind, (UninitializedBuffer, UninitializedParameter))

    @property
    def was_freed(self) -> bool:
        """Whether its memory was given back: its owner fills it anew."""
        return not self.uninitialized and (storage_is_freed(self.alias) or storage_is_freed(self.tensor))

    @property
    def was_written(self) -> bool:
        """Whether something was written to it, as far as is known without a copy."""
        tensor = self.tensor
        return self.version is not None and not tensor.is_inference() and tensor._version != self.version

    @property
    def was_replaced(self) -> bool:
        """Whether it has another storage."""
        if self._kind is not type(self.tensor):
            return True
        alias = self.alias
        if self.uninitialized or is_traceable_wrapper_subclass(alias) or alias.layout is not torch.strided:
            return False
        if storage_is_freed(alias):
            return False
        tensor = self.tensor
        return (
            tensor.untyped_storage()._cdata != alias.untyped_storage()._cdata or tensor.shape != alias.shape
        )

    @property
    def was_set(self) -> bool:
        """Whether it was written to or replaced, with whatever values; what its owner freed since is the owner's."""
        return (self.was_written or self.was_copied or self.was_replaced) and not self.was_freed

    @property
    def differs(self) -> bool:
        """Whether its values are not what they were."""
        if self._kind is not type(self.tensor):
            return True
        if self.was_freed:
            return False
        if self.copy is None:
            return self.was_written or (self.was_replaced and not alike(self.alias, self.tensor.data))
        return not alike(self.copy, self.tensor.data)

    @property
    def is_lost(self) -> bool:
        """Whether it was written to, and can't be put back."""
        return self.copy is None and self.was_written and not self.was_replaced and not self.was_freed

    def changes(self) -> Iterator[StepChange]:
        """Itself, where it was written to: an average that starts as a copy has its old values after a first step."""
        if self.differs or (self.place.kind in ("parameter", "buffer") and self.was_set):
            yield self.place.change()

    def now(self, change: StepChange) -> Tensor:
        """What it holds now."""
        return self.tensor.data

    def before(self, now: Tensor) -> Tensor:
        """What it held; where that is not known, what it holds."""
        return self.alias if self.copy is None else self.copy

    def restore(self) -> None:
        """Put it back: its class, its storage, its values."""
        tensor = self.tensor
        replaced = self.was_replaced
        with torch._C.DisableTorchFunctionSubclass():
            if self._kind is not type(tensor):
                tensor.__class__ = self._kind
            if replaced:
                tensor.data = self.alias
        if self.copy is not None and not self.was_freed and not same_bits(self.copy, self.alias):
            with torch.inference_mode(self.alias.is_inference()), torch.no_grad():
                self.alias.copy_(self.copy) if replaced else tensor.copy_(self.copy)
        if self.version is not None and not tensor.is_inference():
            self.version = tensor._version
