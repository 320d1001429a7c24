"""Snapshots of what belongs to classes: their attributes, and the class that a module has."""

from collections.abc import Iterator
from typing import Any

from torch import nn
from typing_extensions import override

from lightning_memkit.micro_batching.changes.alike import alike
from lightning_memkit.micro_batching.changes.kept_state import Kept, Unreported
from lightning_memkit.micro_batching.changes.kept_tensor import Place
from lightning_memkit.micro_batching.changes.step_changes import ABSENT, StepChange
from lightning_memkit.utilities.class_attributes import class_attributes, restore_class_attributes


class KeptClassAttributes(Kept):
    """Snapshot of the class attributes of a user's class; those that a step adds are removed."""

    def __init__(self, place: Place, owner: type) -> None:
        self.place, self._owner, self.items = place, owner, class_attributes(owner)
        self._names_in_all = len(vars(owner))  # with those of functions

    def _names(self) -> list[str]:
        return list({**self.items, **class_attributes(self._owner)})

    @property
    @override
    def is_still(self) -> bool:
        now = vars(self._owner)
        same = all(now.get(name, ABSENT) is before for name, before in self.items.items())
        return same and len(now) == self._names_in_all

    @override
    def moved(self) -> Iterator[StepChange]:
        for name in () if self.is_still else self._names():
            if vars(self._owner).get(name, ABSENT) is not self.items.get(name, ABSENT):
                yield StepChange(kind="attribute", name=f"{self._owner.__name__}.{name}")

    @override
    def changes(self) -> Iterator[StepChange]:
        for name in self._names():
            if not alike(self.items.get(name, ABSENT), vars(self._owner).get(name, ABSENT)):
                yield StepChange(kind="attribute", name=f"{self._owner.__name__}.{name}")

    @override
    def now(self, change: StepChange) -> Any:
        return {name: vars(self._owner).get(name, ABSENT) for name in self._names()}

    @override
    def before(self, now: Any) -> Any:
        return {key: self.items.get(key) for key in now}

    @override
    def restore(self) -> None:
        restore_class_attributes(self._owner, self.items)


class KeptClass(Unreported):
    """Snapshot of a module's class, which a lazy module changes in its first forward."""

    def __init__(self, place: Place, owner: nn.Module) -> None:
        self.place, self._owner, self._kind = place, owner, type(owner)

    @override
    def restore(self) -> None:
        if type(self._owner) is not self._kind:
            self._owner.__class__ = self._kind
