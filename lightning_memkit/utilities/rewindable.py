"""Iterators that can go back: wrappers that yield again what was drawn, and draw the same random numbers with it."""

import functools
import warnings
import weakref
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import lru_cache
from io import IOBase
from types import BuiltinMethodType, CellType, FunctionType, MethodWrapperType
from typing import Any

from lightning_memkit.utilities.generators import Generators

_CALLS = ("__next__", "send")  # methods of an iterator that draw
_OTHER_NUMBERS = (
    "An iterator of the module's ({kind}) draws from the global random generators, and what it drew in a trial is "
    "used where other numbers would have been drawn: random numbers differ from a run without trials. Let it draw "
    "from a generator of its own (torch.Generator)."
)
_SENT_OTHERWISE = (
    "A generator of the module's ({kind}) was sent another value than in a trial, and a generator can't go back: it "
    "goes on from where the trial left it. Keep its state in attributes."
)


@lru_cache(maxsize=1024)
def _is_known(kind: type) -> bool:
    known = kind.__module__ in ("builtins", "itertools", "_csv") or (
        kind.__module__.startswith("torch.utils.data")
    )
    return known and issubclass(kind, Iterator) and not issubclass(kind, IOBase)


@lru_cache(maxsize=4096)
def _may_draw(kind: type) -> bool:
    """Whether a value of this class may be an iterator, a method of one, or a tuple that holds one."""
    return _is_known(kind) or kind in (BuiltinMethodType, MethodWrapperType) or issubclass(kind, tuple)


@dataclass(eq=False)
class Mark:
    """A position that its iterator can go back to, as long as the mark is alive."""

    iterator: "Rewindable"
    position: int

    @property
    def was_passed(self) -> bool:
        """Whether items were drawn since."""
        return self.iterator.position != self.position

    def go_back(self) -> None:
        """Let the iterator yield again what it has drawn since."""
        self.iterator.back_to(self.position)


@dataclass(frozen=True, kw_only=True)
class _Drawn:
    """An item, the value that was sent for it, and the random generators before and after, if it drew from them."""

    item: Any
    sent: Any
    before: Generators | None = None
    after: Generators | None = None


class Rewindable:
    """Wraps an iterator so that it can go back; keeps the items since the earliest mark still alive.

    Args:
        source: the iterator; each of its items is drawn once.
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self.source = source
        self.position = 0
        self._drawn: deque[_Drawn] = deque()  # the last items before the position
        self._again: deque[_Drawn] = deque()  # items to yield again after going back
        self._marks: weakref.WeakSet[Mark] = weakref.WeakSet()
        self._has_warned = False

    def __iter__(self) -> "Rewindable":
        return self

    def __next__(self) -> Any:
        return self._next(None)

    def send(self, value: Any) -> Any:
        """Send a value to a generator; an item that was drawn for the same value is yielded again."""
        return self._next(value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "source":
            raise AttributeError(name)
        return getattr(self.source, name)

    def __getstate__(self) -> dict[str, Any]:
        again = deque(_Drawn(item=one.item, sent=one.sent) for one in self._again)
        return {**vars(self), "_drawn": deque(), "_again": again, "_marks": weakref.WeakSet()}

    def mark(self) -> Mark:
        """Keep the items that are drawn from now on, as long as the mark is alive."""
        first = min((one.position for one in self._marks), default=self.position)
        while len(self._drawn) > self.position - first:
            self._drawn.popleft()
        mark = Mark(self, self.position)
        self._marks.add(mark)
        return mark

    def back_to(self, position: int) -> None:
        """Go back: items drawn since `position` are yielded again."""
        while self.position > position and self._drawn:
            self._again.appendleft(self._drawn.pop())
            self.position -= 1

    def _next(self, sent: Any) -> Any:
        if self._again and not _is_same(self._again[0].sent, sent):
            self._again.clear()
            self._warn(_SENT_OTHERWISE)
        drawn = self._repeated(self._again.popleft()) if self._again else self._from_source(sent)
        self.position += 1
        if self._marks:
            self._drawn.append(drawn)
        return drawn.item

    def _from_source(self, sent: Any) -> _Drawn:
        before = Generators() if self._marks else None
        source: Any = self.source
        item = next(source) if sent is None else source.send(sent)
        if before is None or before.stand_as_now():
            return _Drawn(item=item, sent=sent)
        return _Drawn(item=item, sent=sent, before=before, after=Generators())

    def _repeated(self, drawn: _Drawn) -> _Drawn:
        """Draw the item's random numbers again, by setting the generators to where they were after it."""
        if drawn.before is not None and drawn.after is not None:
            if drawn.before.stand_as_now():
                drawn.after.restore()
            else:
                self._warn(_OTHER_NUMBERS)
        return drawn

    def _warn(self, words: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(words.format(kind=type(self.source).__name__), stacklevel=4)


_WRAPPERS: "weakref.WeakValueDictionary[int, Rewindable]" = weakref.WeakValueDictionary()


def rewindable(source: Any) -> Rewindable:
    """The wrapper of an iterator: the same one, wherever the iterator is held."""
    if isinstance(source, Rewindable):
        return source
    wrapper = _WRAPPERS.get(id(source))
    if wrapper is None or wrapper.source is not source:
        wrapper = _WRAPPERS[id(source)] = Rewindable(source)
    return wrapper


def make_rewindable(holder: Any) -> None:
    """Replace the iterators that a dict, list, deque, closure cell, partial or function holds by wrappers.

    Methods of iterators (`itertools.count().__next__`) and tuples of iterators are replaced, too.
    """
    if isinstance(holder, (dict, list, deque)):
        items = holder.items() if isinstance(holder, dict) else enumerate(holder)
        places = [(key, value) for key, value in items if _may_draw(type(value))]
        base: Any = dict if isinstance(holder, dict) else list if isinstance(holder, list) else deque
        for key, value in places:
            other = _replacement(value)
            if other is not value:
                base.__setitem__(holder, key, other)
    elif isinstance(holder, CellType):
        try:
            value = holder.cell_contents
        except ValueError:  # the cell is empty
            return
        other = _replacement(value)
        if other is not value:
            holder.cell_contents = other
    elif isinstance(holder, functools.partial):
        arguments, keywords = _replacement(holder.args), dict(holder.keywords)
        function = _replacement(holder.func)
        make_rewindable(keywords)
        same = all(keywords[name] is value for name, value in holder.keywords.items())
        if arguments is not holder.args or function is not holder.func or not same:
            state: Any = (function, arguments, keywords, vars(holder))
            setstate: Any = holder.__setstate__  # pyright: ignore[reportAttributeAccessIssue]
            setstate(state)
    elif isinstance(holder, FunctionType):
        defaults = _replacement(holder.__defaults__)
        if defaults is not holder.__defaults__:
            holder.__defaults__ = defaults
        if holder.__kwdefaults__:
            make_rewindable(holder.__kwdefaults__)


def _replacement(value: Any) -> Any:
    """The wrapper of an iterator, its bound method for one of an iterator, a tuple with wrappers; else the value."""
    kind = type(value)
    if _is_known(kind):
        return rewindable(value)
    if kind in (BuiltinMethodType, MethodWrapperType) and value.__name__ in _CALLS:
        return (
            getattr(rewindable(value.__self__), value.__name__) if _is_known(type(value.__self__)) else value
        )
    if kind is tuple or (isinstance(value, tuple) and hasattr(kind, "_make")):
        items = [_replacement(item) for item in value]
        if any(map(lambda a, b: a is not b, items, value)):
            return tuple(items) if kind is tuple else kind._make(items)  # pyright: ignore[reportAttributeAccessIssue]
    return value


def _is_same(a: Any, b: Any) -> bool:
    plain = (type(None), bool, int, float, str, bytes)
    return a is b or (isinstance(a, plain) and isinstance(b, plain) and a == b)


_GENERATORS: Any = Generator
_GENERATORS.register(Rewindable)  # to code that asks, it is what it wraps
