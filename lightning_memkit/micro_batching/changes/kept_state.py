"""Snapshots of values that a step may change: each tells whether its value changed, and restores it."""

from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Container, Iterable, Iterator
from operator import is_
from typing import Any

from typing_extensions import override

from lightning_memkit.micro_batching.changes.alike import alike
from lightning_memkit.micro_batching.changes.kept_tensor import Place
from lightning_memkit.micro_batching.changes.own_objects import slots_of
from lightning_memkit.micro_batching.changes.step_changes import ABSENT, StepChange, kind_of


class Kept(ABC):
    """A snapshot of one value."""

    place: Place

    @abstractmethod
    def changes(self) -> Iterator[StepChange]:
        """What has changed since the snapshot."""

    @property
    def is_still(self) -> bool:
        """Whether `moved` is known at once to tell nothing."""
        return False

    def moved(self) -> Iterator[StepChange]:
        """What is no longer the same object, whatever its value: cheap enough for every step."""
        return self.changes()

    @abstractmethod
    def now(self, change: StepChange) -> Any:
        """The current value of what `change` names."""

    @abstractmethod
    def before(self, now: Any) -> Any:
        """The value of the snapshot, against which a change of numbers and tensors is measured; else None."""

    @abstractmethod
    def restore(self) -> None:
        """Restore the value of the snapshot."""


class Unreported(Kept):
    """A snapshot that is restored, and whose changes count as none."""

    @override
    def changes(self) -> Iterator[StepChange]:
        return iter(())

    @override
    def now(self, change: StepChange) -> Any:
        return None

    @override
    def before(self, now: Any) -> Any:
        return None


class KeptDict(Kept):
    """Snapshot of a dictionary's items, by reference: of an object's attributes, or of a plain dictionary.

    Args:
        place: where it is.
        owner: the dictionary.
        passed_over: keys that are neither compared nor restored.
        attributes: it is an object's `__dict__`, so that keys are attribute names.
    """

    def __init__(
        self,
        place: Place,
        owner: dict[Any, Any],
        passed_over: Container[str] = (),
        *,
        attributes: bool,
    ) -> None:
        self.place, self._owner, self._passed_over, self._attributes = place, owner, passed_over, attributes
        self.items = {key: value for key, value in owner.items() if key not in passed_over}
        self._values = list(owner.values()) if passed_over else self.items.values()

    @property
    def owner(self) -> dict[Any, Any]:
        """The dictionary itself."""
        return self._owner

    @property
    def is_metric(self) -> bool:
        """Whether it holds the attributes of a torchmetrics metric, which has a table of its states."""
        return self._attributes and self.place.kind == "metric" and "_defaults" in self._owner

    @property
    @override
    def is_still(self) -> bool:
        values = self._owner.values()
        return len(values) == len(self._values) and all(map(is_, values, self._values))

    @override
    def moved(self) -> Iterator[StepChange]:
        if self.is_still:
            return
        if not self._attributes:
            yield self.place.change()
            return
        now = {key: value for key, value in self._owner.items() if key not in self._passed_over}
        for key in {**self.items, **now}:
            after = now.get(key, ABSENT)
            if after is not self.items.get(key, ABSENT):
                yield self._change(key, after)

    @override
    def changes(self) -> Iterator[StepChange]:
        now = {key: value for key, value in self._owner.items() if key not in self._passed_over}
        if not self._attributes:
            if not alike(self.items, now):
                yield self.place.change()
            return
        for key in {**self.items, **now}:
            before, after = self.items.get(key, ABSENT), now.get(key, ABSENT)
            if not alike(before, after):
                yield self._change(key, after)

    def _change(self, key: Any, after: Any) -> StepChange:
        kind = kind_of(self.items.get(key, ABSENT), after)
        return self.place.change(f".{key}" if self.place.name else str(key), kind)

    @override
    def now(self, change: StepChange) -> Any:
        now = {key: value for key, value in self._owner.items() if key not in self._passed_over}
        if not self._attributes:
            return now
        private = {key for key in now if change.kind == "metric" and str(key).startswith("_")}
        return {
            key: value
            for key, value in now.items()
            if key not in private
            and not alike(self.items.get(key, ABSENT), value)
            and self._change(key, value) == change
        }

    @override
    def before(self, now: Any) -> Any:
        return {key: self.items.get(key) for key in now}

    @override
    def restore(self) -> None:
        owner = self._owner
        if self._passed_over or self._attributes:
            for key in [key for key in owner if key not in self._passed_over and key not in self.items]:
                del owner[key]
            for key, value in self.items.items():
                if owner.get(key, ABSENT) is not value:
                    owner[key] = value
            return
        set_items(owner, self.items)


def set_items(owner: dict[Any, Any], items: dict[Any, Any]) -> None:
    """Restore a dictionary's items and their order."""
    if not owner and not items:
        return
    kept, now = list(items.items()), list(owner.items())
    if len(kept) == len(now) and all(a is c and b is d for (a, b), (c, d) in zip(kept, now, strict=True)):
        return
    # A user's subclass may have side effects in its methods: use those of the base class.
    base: Any = OrderedDict if isinstance(owner, OrderedDict) else dict
    base.clear(owner)
    for key, value in items.items():
        base.__setitem__(owner, key, value)


class KeptHooks(Unreported):
    """Snapshot of tables of hooks; what a step adds or removes is undone, but not reported as a change.

    Args:
        place: the owner of the hooks.
        tables: one table for each kind of hook.
    """

    def __init__(self, place: Place, tables: Iterable[dict[Any, Any]]) -> None:
        self.place = place
        self._tables = [(table, dict(table) if table else {}) for table in tables]

    @property
    @override
    def is_still(self) -> bool:
        return not any(
            (table or hooks)
            and (len(table) != len(hooks) or not all(map(is_, table.values(), hooks.values())))
            for table, hooks in self._tables
        )

    @override
    def restore(self) -> None:
        for table, hooks in self._tables:
            set_items(table, hooks)


class KeptItems(Kept):
    """Snapshot of the items of a list, deque or set, by reference."""

    def __init__(self, place: Place, owner: Any) -> None:
        self.place, self._owner, self.items = place, owner, list(owner)

    @override
    def moved(self) -> Iterator[StepChange]:
        owner = self._owner
        if len(owner) != len(self.items) or not all(map(is_, owner, self.items)):
            yield self.place.change()

    @override
    def changes(self) -> Iterator[StepChange]:
        now = list(self._owner)
        same = set(self.items) == set(now) if isinstance(self._owner, set) else alike(self.items, now)
        if not same:
            yield self.place.change()

    @override
    def now(self, change: StepChange) -> Any:
        now = list(self._owner)
        if isinstance(self._owner, set):
            return set(self._owner)
        gained = len(now) >= len(self.items) and all(map(lambda a, b: a is b, self.items, now))
        return now[len(self.items) :] if gained and isinstance(self._owner, list) else now

    @override
    def before(self, now: Any) -> Any:
        return None

    @override
    def restore(self) -> None:
        owner = self._owner
        if len(owner) == len(self.items) and all(a is b for a, b in zip(owner, self.items, strict=True)):
            return
        if isinstance(owner, list):
            list.__setitem__(owner, slice(None), self.items)
        elif isinstance(owner, deque):
            deque.clear(owner)
            deque.extend(owner, self.items)
        else:
            set.clear(owner)
            set.update(owner, self.items)


class KeptSlots(Kept):
    """Snapshot of an object's slots."""

    def __init__(self, place: Place, owner: object) -> None:
        self.place, self._owner = place, owner
        self.items = {name: getattr(owner, name, ABSENT) for name in slots_of(type(owner))}

    @override
    def moved(self) -> Iterator[StepChange]:
        for name, before in self.items.items():
            if getattr(self._owner, name, ABSENT) is not before:
                yield self.place.change(f".{name}")

    @override
    def changes(self) -> Iterator[StepChange]:
        for name, before in self.items.items():
            if not alike(before, getattr(self._owner, name, ABSENT)):
                yield self.place.change(f".{name}")

    @override
    def now(self, change: StepChange) -> Any:
        return {name: getattr(self._owner, name, ABSENT) for name in self.items}

    @override
    def before(self, now: Any) -> Any:
        return {key: self.items.get(key) for key in now}

    @override
    def restore(self) -> None:
        for name, before in self.items.items():
            now = getattr(self._owner, name, ABSENT)
            if before is ABSENT and now is not ABSENT:
                object.__delattr__(self._owner, name)
            elif before is not now:
                object.__setattr__(self._owner, name, before)
