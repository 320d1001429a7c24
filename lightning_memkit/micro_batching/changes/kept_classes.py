"""Snapshots of what belongs to classes: their attributes, and the class that a module has."""

from collections.abc import Iterator
from typing import Any

from torch import nn
from typing_extensions import override

from lightning_memkit.micro_batching.changes.alike import alike
from lightning_memkit.micro_batching.changes.kept_state import Kept
from lightning_memkit.micro_batching.changes.kept_tensor import Place
from lightning_memkit.micro_batching.changes.step_changes import ABSENT, StepChange


class KeptClassAttributes(Kept):
    """Snapshot of the class attributes of a user's class."""

    def __init__(self, place: Place, owner: type, items: dict[str, Any]) -> None:
        self.place, self._owner, self.items = place, owner, items

    @override
    def moved(self) -> Iterator[StepChange]:
        for name, before in self.items.items():
            if vars(self._owner).get(name, ABSENT) is not before:
                yield StepChange(kind="attribute", name=f"{self._owner.__name__}.{name}")

    @override
    def changes(self) -> Iterator[StepChange]:
        for name, before in self.items.items():
            if not alike(before, vars(self._owner).get(name, ABSENT)):
                yield StepChange(kind="attribute", name=f"{self._owner.__name__}.{name}")

    @override
    def now(self, change: StepChange) -> Any:
        return {name: vars(self._owner).get(name, ABSENT) for name in self.items}

    @override
    def before(self, now: Any) -> Any:
        return {key: self.items.get(key) for key in now}

    @override
    def restore(self) -> None:
        for name, before in self.items.items():
            if vars(self._owner).get(name, ABSENT) is not before:
                setattr(self._owner, name, before)


class KeptClass(Kept):
    """Snapshot of a module's class, which a lazy module changes in its first forward."""

    def __init__(self, place: Place, owner: nn.Module) -> None:
        self.place, self._owner, self._kind = place, owner, type(owner)

    @override
    def changes(self) -> Iterator[StepChange]:
        return iter(())

    @override
    def now(self, change: StepChange) -> Any:
        return type(self._owner)

    @override
    def before(self, now: Any) -> Any:
        return None

    @override
    def restore(self) -> None:
        if type(self._owner) is not self._kind:
            self._owner.__class__ = self._kind
