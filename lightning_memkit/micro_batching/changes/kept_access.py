"""Snapshots of objects of Python's and torch's whose state is read and set by calls: files, shared memory, caches."""

import ctypes
import functools
import gc
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from io import BytesIO, IOBase, StringIO, TextIOWrapper
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_memkit.micro_batching.changes.alike import alike
from lightning_memkit.micro_batching.changes.kept_state import Kept, Unreported
from lightning_memkit.micro_batching.changes.kept_tensor import Place
from lightning_memkit.micro_batching.changes.step_changes import StepChange, label
from lightning_memkit.utilities.generators import Generators

_MOST_BYTES = 2**20  # of a file in memory, or of shared memory, that is copied
_CTYPES: tuple[type, ...] = (ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union)
_CACHE: type = functools._lru_cache_wrapper
_NOT_PUT_BACK = (
    "MemoryBudget can't put back {name} ({kind}): {why}. What trials and retried steps change there stays changed. "
    "{remedy}"
)
_FILE_REMEDY = "Read it outside of training_step (in the data set), or keep what it holds in a list."
_CACHE_REMEDY = "Draw what it holds before training, or keep it in a buffer."


@dataclass(frozen=True, kw_only=True)
class _Access:
    """How the state of one kind of object is read and set."""

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], Any]


def access_to(value: Any) -> _Access | None:
    """How to read and set a value's state; None for an object that has no such state, or is too large."""
    if isinstance(value, _CTYPES):
        return _OF_BYTES if ctypes.sizeof(value) <= _MOST_BYTES else None
    if type(value).__module__ == "multiprocessing.sharedctypes" and hasattr(value, "get_obj"):
        return _OF_SHARED if ctypes.sizeof(value.get_obj()) <= _MOST_BYTES else None
    if isinstance(value, (StringIO, BytesIO)):
        return None if value.closed or value.tell() > _MOST_BYTES else _IN_MEMORY
    if isinstance(value, np.random.SeedSequence):
        return _OF_SEEDS
    if isinstance(value, memoryview):
        return _OF_BYTES if _is_writable(value) else None
    if isinstance(value, IOBase):
        return _OF_FILES if _is_on_disk(value) else None
    return _OF_VARIABLES if isinstance(value, ContextVar) else None


class KeptAccess(Kept):
    """Snapshot of the state of an object that is read and set by calls."""

    def __init__(self, place: Place, owner: Any, access: _Access) -> None:
        self.place, self._owner, self._access = place, owner, access
        self._state: Any = None
        self._failure = ""
        try:
            self._state = access.read(owner)
        except (OSError, ValueError, RuntimeError) as error:
            self._failure = str(error)

    @override
    def changes(self) -> Iterator[StepChange]:
        if not self._failure and not alike(self._state, self._read()):
            yield self.place.change()

    def _read(self) -> Any:
        try:
            return self._access.read(self._owner)
        except (OSError, ValueError, RuntimeError) as error:  # a file that is iterated over tells no position
            return str(error)

    @override
    def now(self, change: StepChange) -> Any:
        return self._read()

    @override
    def before(self, now: Any) -> Any:
        return None

    @override
    def restore(self) -> None:
        if not self._failure:
            if alike(self._state, self._read()):
                return
            try:
                self._access.write(self._owner, self._state)
            except (OSError, ValueError, RuntimeError) as error:
                self._failure = str(error)
        if self._failure:
            name, kind = label(self.place.path, self.place.name), type(self._owner).__name__
            words = _NOT_PUT_BACK.format(name=name, kind=kind, why=self._failure, remedy=_FILE_REMEDY)
            warnings.warn(words, stacklevel=2)


class KeptCache(Unreported):
    """Snapshot of a function's cache (`functools.lru_cache`); results that trials added are forgotten.

    A result that a trial has drawn from random generators would otherwise be used without its draw. A new result is no
    change: the next micro-batch finds it, as the next batch does.
    """

    def __init__(self, place: Place, owner: Any) -> None:
        self.place, self._owner, self._random = place, owner, Generators()
        self._misses, self._size = owner.cache_info().misses, owner.cache_info().currsize
        self._items = _table_of(owner)

    @override
    def restore(self) -> None:
        if self._owner.cache_info().misses == self._misses:
            return
        if self._size == 0:
            self._owner.cache_clear()
        elif self._items is not None:
            table = _cache_within(self._owner)
            if table is not None:
                table.clear()
                table.update(self._items)
        elif not self._random.stand_as_now():
            name, kind = label(self.place.path, self.place.name), "a cache of limited size"
            why = "it held results before the step, and which ones the step added can't be told"
            words = _NOT_PUT_BACK.format(name=name, kind=kind, why=why, remedy=_CACHE_REMEDY)
            warnings.warn(words, stacklevel=2)
        self._misses = self._owner.cache_info().misses


def is_cache(value: Any) -> bool:
    """Whether it is a function with a cache of its results."""
    return isinstance(value, _CACHE)


def _cache_within(owner: Any) -> dict[Any, Any] | None:
    """The table of an unlimited cache; of a limited one it can't be changed from outside."""
    if owner.cache_parameters()["maxsize"] is not None:
        return None
    known = (owner.__dict__, owner.__wrapped__)
    tables = [one for one in gc.get_referents(owner) if type(one) is dict and one is not known[0]]
    return tables[0] if len(tables) == 1 and len(tables[0]) == owner.cache_info().currsize else None


def _table_of(owner: Any) -> dict[Any, Any] | None:
    table = _cache_within(owner)
    return None if table is None else dict(table)


class KeptScript(Kept):
    """Snapshot of the plain attributes of a module of TorchScript, which Python's `__dict__` does not show."""

    def __init__(self, place: Place, owner: Any) -> None:
        self.place, self._owner = place, owner
        self.items = self._read()

    def _read(self) -> dict[str, Any]:
        kinds: Any = getattr(self._owner, "_concrete_type", None)
        names = () if kinds is None else kinds.get_attributes()
        values = {name: getattr(self._owner, name) for name in names if name != "training"}
        return {name: value for name, value in values.items() if not isinstance(value, Tensor)}

    @override
    def changes(self) -> Iterator[StepChange]:
        now = self._read()
        for name, before in self.items.items():
            if not alike(before, now.get(name)):
                yield self.place.change(f".{name}" if self.place.name else name)

    @override
    def now(self, change: StepChange) -> Any:
        return self._read()

    @override
    def before(self, now: Any) -> Any:
        return self.items

    @override
    def restore(self) -> None:
        now = self._read()
        for name, before in self.items.items():
            if not alike(before, now.get(name)):
                setattr(self._owner, name, before)


def is_script(value: Any) -> bool:
    """Whether a module was compiled by TorchScript."""
    return isinstance(value, torch.jit.ScriptModule)


def _bytes_of(value: Any) -> bytes:
    return bytes(memoryview(value))


def _set_bytes(value: Any, state: bytes) -> None:
    memoryview(value).cast("B")[:] = state


def _is_writable(view: memoryview) -> bool:
    try:
        return not view.readonly and view.c_contiguous and view.nbytes <= _MOST_BYTES
    except ValueError:  # it was released
        return False


def _set_spawned(seeds: Any, spawned: int) -> None:
    """Restore how many sequences were spawned, which only the constructor sets."""
    seeds.__init__(
        seeds.entropy, spawn_key=seeds.spawn_key, pool_size=seeds.pool_size, n_children_spawned=spawned
    )


def _is_on_disk(file: IOBase) -> bool:
    """Whether it is an open file with a position; terminals and pipes have none."""
    return not file.closed and file.seekable() and not file.isatty()


def _file_position(file: Any) -> tuple[Any, int | None]:
    """The position and, if writing goes on at its end, the length of a file."""
    if not file.writable():
        return file.tell(), None
    file.flush()
    position = file.tell()
    end = file.seek(0, 2)
    file.seek(position)
    return position, end


def _set_file_position(file: Any, state: tuple[Any, int | None]) -> None:
    position, end = state
    if end is not None:
        file.flush()
        raw = file.buffer if isinstance(file, TextIOWrapper) else file
        raw.truncate(end)
    file.seek(position)


def _set_in_memory(file: Any, state: tuple[Any, int]) -> None:
    content, position = state
    file.seek(0)
    file.truncate()
    file.write(content)
    file.seek(position)


_OF_BYTES = _Access(read=_bytes_of, write=_set_bytes)
_OF_SEEDS = _Access(read=lambda seeds: seeds.n_children_spawned, write=_set_spawned)
_OF_SHARED = _Access(
    read=lambda value: _bytes_of(value.get_obj()),
    write=lambda value, state: _set_bytes(value.get_obj(), state),
)
_IN_MEMORY = _Access(read=lambda file: (file.getvalue(), file.tell()), write=_set_in_memory)
_OF_FILES = _Access(read=_file_position, write=_set_file_position)
_UNSET = object()


def _set_variable(variable: Any, state: Any) -> None:
    if state is not _UNSET:
        variable.set(state)


_OF_VARIABLES = _Access(read=lambda variable: variable.get(_UNSET), write=_set_variable)
