"""Finds what an optimizer keeps outside `state` and its groups: attributes with buffers, counters, optimizers.

Code that copies, rolls back or widens what a step changes must handle these, too. The search descends, at any
depth, into lists, tuples, dicts, sets, deques, arrays, bytes, generators, iterators, closure variables of
functions, objects of the optimizer's own, and modules other than the one that it trains. It skips classes, and
whatever belongs to Lightning or to torch's own machinery.
"""

from array import array
from collections import deque
from collections.abc import Iterator
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memkit.utilities.class_attributes import class_attributes
from lightning_memkit.utilities.generators import GENERATORS, set_state, state_of
from lightning_memkit.utilities.rewindable import Rewindable, make_rewindable

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
CONTAINERS = (dict, list, set, deque)
BYTES = (bytearray, array)
_OF_EVERY_OPTIMIZER = frozenset({"state", "param_groups", "defaults", "_opt_called"})
# Methods that someone replaced; they belong to the replacement.
_REPLACED = ("step", "state_dict", "load_state_dict", "get_state_buffer")
_NOT_LOOKED_INTO = (nn.Module, type, ModuleType, BuiltinFunctionType, np.dtype, np.generic, torch.Stream)
_LIBRARY = ("torch", "typing", "abc", "collections")
_FOREIGN = (
    "abc.",
    "functools.",
    "lightning.",
    "lightning_memkit.",
    "logging.",
    "threading.",
    "torch.autograd.",
    "torch.distributed.",
    "torch.utils.data.",
    "torch.utils.hooks.",
    "typing.",
)


def own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """The attributes of an optimizer that neither every optimizer has nor this package set.

    A step that was replaced on the object is not included. Iterators among them become rewindable.
    """
    make_rewindable(vars(optimizer))
    return {name: value for name, value in vars(optimizer).items() if is_own(name)}


def is_own(name: str) -> bool:
    """Whether an attribute of this name is the optimizer's own, not one of every optimizer or of this package."""
    if name in _OF_EVERY_OPTIMIZER or name in _REPLACED:
        return False
    return not name.startswith(
        ("_memkit", "_optimizer_", "_patch", "_zero_grad_profile", "_warned_capturable")
    )


def own_class_attributes(optimizer: Optimizer) -> list[tuple[type, dict[str, Any]]]:
    """The classes of an optimizer that are not torch's, with the attributes of each."""
    bases = type(optimizer).__mro__[:-1]
    return [
        (base, class_attributes(base)) for base in bases if base.__module__.partition(".")[0] not in _LIBRARY
    ]


def own_numbers(optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's own attributes that are numbers, flags or strings."""
    return {name: value for name, value in own_attributes(optimizer).items() if isinstance(value, PLAIN)}


def has_own_values(optimizer: Optimizer) -> bool:
    """Whether an optimizer keeps tensors or objects outside `state`, which no step in buckets can follow."""
    values = list(own_attributes(optimizer).values())
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for group in optimizer.param_groups:
        values += [value for name, value in group.items() if name != "params"]
    return any(
        isinstance(item, CONTAINERS) or (isinstance(item, Tensor) and item.dim() > 0)
        for value in values
        for _, item in contents(value, "", set(trained))
    )


def inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that a wrapper (Lookahead) holds, at any depth, each once; none for most optimizers."""
    found: list[Optimizer] = []
    seen = {id(optimizer)}

    def look(value: Any) -> None:
        if isinstance(value, (*PLAIN, Tensor)) or id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, Optimizer):
            found.append(value)
            items: Any = own_attributes(value).values()
        elif isinstance(value, dict):
            items = list(value.values())
        elif isinstance(value, (*CONTAINERS, tuple, frozenset)):
            items = list(value)
        else:
            items = list(vars(value).values()) if _is_object(value) and hasattr(value, "__dict__") else ()
        for item in items:
            look(item)

    for value in own_attributes(optimizer).values():
        look(value)
    return found


def contents(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Walk a value at any depth: each tensor, array and generator, and each object that can be changed in place.

    Yields pairs of a path such as ``bufs[3]`` and the value; a container comes before its contents. For an
    object it yields the dict of its attributes, for a function's closure variable its cell.

    Args:
        value: anything.
        path: its name.
        seen: ids that were visited already; extended in place.
    """
    if isinstance(value, PLAIN) or id(value) in seen:
        return
    if isinstance(value, _NOT_LOOKED_INTO) and not _is_own_module(value, seen):
        return
    seen.add(id(value))
    if isinstance(value, (Tensor, np.ndarray, Rewindable, *BYTES, *GENERATORS)):
        yield path, value
    elif isinstance(value, dict):
        yield path, value
        for key, item in list(value.items()):
            yield from contents(item, f"{path}[{_named(key)}]", seen)
    elif isinstance(value, (*CONTAINERS, tuple, frozenset)):
        if isinstance(value, CONTAINERS):
            yield path, value
        for place, item in enumerate(list(value)):
            yield from contents(item, f"{path}[{place}]", seen)
    elif isinstance(value, MethodType):
        yield from contents(value.__self__, path, seen)
    elif isinstance(value, FunctionType):
        yield from _variables(value, path, seen)
    else:
        yield from _attributes(value, path, seen)


def _is_own_module(value: Any, seen: set[int]) -> bool:
    """Whether it is a module that holds none of the parameters that the optimizer steps."""
    return isinstance(value, nn.Module) and not any(id(parameter) in seen for parameter in value.parameters())


def _variables(function: FunctionType, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if f"{function.__module__}.".startswith((*_FOREIGN, "torch.")):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            inside = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        yield f"{path}.{name}", cell
        yield from contents(inside, f"{path}.{name}", seen)


def _attributes(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if not _is_object(value) and not isinstance(value, nn.Module):
        return
    if hasattr(value, "__dict__"):
        attributes = vars(value)
        if isinstance(value, Optimizer):  # torch's hooks and caches are skipped
            yield path, attributes
            for name, item in list(attributes.items()):
                if is_own(name) or name in ("state", "param_groups"):
                    yield from contents(item, f"{path}.{name}", seen)
        elif isinstance(value, nn.Module):
            yield path, attributes
            for name, item in list(attributes.items()):
                if not name.endswith("_hooks"):
                    yield from contents(item, f"{path}.{name}", seen)
        else:
            for inner, item in contents(attributes, path, seen):
                yield _as_attribute(path, inner), item
    for slot in _slots(value):
        yield from contents(getattr(value, slot), f"{path}.{slot}", seen)


def _is_object(value: Any) -> bool:
    """Whether a value is an object of the optimizer's own that has attributes."""
    plain = (*PLAIN, *_NOT_LOOKED_INTO, *CONTAINERS, Tensor, tuple, frozenset, FunctionType, MethodType)
    if isinstance(value, plain):
        return False
    foreign = f"{type(value).__module__}.".startswith(_FOREIGN)
    return not foreign and (hasattr(value, "__dict__") or bool(_slots(value)))


def _slots(value: Any) -> list[str]:
    names = [name for each in type(value).__mro__ for name in _listed(vars(each).get("__slots__", ()))]
    return [name for name in names if not name.startswith("__") and hasattr(value, name)]


def _listed(names: Any) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _named(key: Any) -> str:
    return "<parameter>" if isinstance(key, Tensor) else repr(key)


def _as_attribute(path: str, inner: str) -> str:
    """Rewrite ``path['name']...`` of an object's dict as ``path.name...``."""
    rest = inner[len(path) :]
    if rest.startswith("['"):
        name, _, after = rest[2:].partition("']")
        return f"{path}.{name}{after}"
    return inner


def set_contents(holder: Any, kept: Any) -> None:
    """Restore the copied contents of something that `contents` yielded, in place."""
    if isinstance(holder, CellType):
        holder.cell_contents = kept
    elif isinstance(holder, np.ndarray):
        holder[...] = kept
    elif isinstance(holder, BYTES):
        holder[:] = kept
    elif isinstance(holder, GENERATORS):
        set_state(holder, kept)
    elif isinstance(holder, Rewindable):
        kept.go_back()
    else:
        holder.clear()
        (holder.update if isinstance(holder, (dict, set)) else holder.extend)(kept)


def copied_contents(holder: Any) -> Any:
    """A shallow copy of the contents of something that `contents` yielded, for `set_contents`."""
    if isinstance(holder, CellType):
        return holder.cell_contents
    if isinstance(holder, GENERATORS):
        return state_of(holder)
    if isinstance(holder, BYTES):
        return holder[:]
    if isinstance(holder, Rewindable):
        return holder.mark()
    return holder.copy() if isinstance(holder, (dict, np.ndarray)) else list(holder)
