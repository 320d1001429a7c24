"""Notes what a module's forward may write besides its outputs, and puts it back."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_OWN = ("_parameters", "_buffers", "_modules")
_DEEPEST = 3  # containers within containers
_LIBRARIES = ("torch", "lightning", "lightning_fabric", "pytorch_lightning", "lightning_memkit")


class ModuleState:
    """The buffers and attributes of a module and of all within it, with what they hold.

    Lists, dicts, sets, deques, arrays and plain objects are looked into, a few levels deep; what objects of torch and
    Lightning hold is not.
    """

    def __init__(self, module: nn.Module) -> None:
        self._tables = [(name, part, dict(vars(part))) for name, part in module.named_modules()]
        self._buffers = [(part, dict(part._buffers)) for part in module.modules()]
        self._values = [(tensor, tensor.detach().clone()) for tensor in module.buffers()]
        held = (value for _, _, table in self._tables for name, value in table.items() if name not in _OWN)
        self._containers = {id(one): (one, _copied(one)) for value in held for one in _containers_in(value)}
        self._marks = self._now()

    def changed(self) -> str:
        """The name of one that is another now; empty if none is."""
        now = self._now()
        names = [name for name in (*self._marks, *now) if self._marks.get(name) != now.get(name)]
        return names[0] if names else ""

    def restore(self) -> None:
        """Put everything back."""
        for part, table in self._buffers:
            part._buffers.clear()
            part._buffers.update(table)
        for tensor, value in self._values:
            if not tensor.equal(value):
                tensor.copy_(value)
        for container, items in self._containers.values():
            _put_back(container, items)
        for _, part, table in self._tables:
            vars(part).clear()
            vars(part).update(table)

    def _now(self) -> dict[str, Any]:
        marks = {}
        for name, part, _ in self._tables:
            values = {**part._buffers, **{key: value for key, value in vars(part).items() if key not in _OWN}}
            for key, value in values.items():
                within = tuple(_contents(one) for one in _containers_in(value))
                marks[f"{name}.{key}" if name else key] = _mark(value), within
        return marks


@contextmanager
def wider_dtypes(module: nn.Module) -> Iterator[Callable[[Tensor], Tensor]]:
    """Run the body with weights and buffers of more bits, without autocast; gives what does so to an argument.

    For the body, a copy of the module's weights: of twice their bytes, or less.
    """

    def widened(tensor: Tensor) -> Tensor:
        wider = torch.float64 if tensor.dtype == torch.float32 else torch.float32
        return tensor.to(wider) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor

    tables: list[dict[str, Any]] = []
    for part in module.modules():
        tables += [part._parameters, part._buffers]
    before = [dict(table) for table in tables]
    copies: dict[int, Tensor] = {}
    dtype = torch.get_default_dtype()
    try:
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = copies.setdefault(id(tensor), widened(tensor.detach()))
        with ExitStack() as stack:
            for kind in {tensor.device.type for tensor in copies.values()} | {"cpu"}:
                if torch.amp.is_autocast_available(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            torch.set_default_dtype(torch.float64 if dtype == torch.float32 else torch.float32)
            yield widened
    finally:
        torch.set_default_dtype(dtype)
        for table, tensors in zip(tables, before, strict=True):
            table.update(tensors)


def _containers_in(value: Any, depth: int = 0) -> Iterator[Any]:
    """What can change without being another object: the value if it is one, and those that it holds."""
    if depth > _DEEPEST:
        return
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, (list, deque, set, dict)) or _is_plain(value):
        yield value
        items = value if isinstance(value, (list, deque, set)) else _table_of(value).values()
        for item in list(items):
            yield from _containers_in(item, depth + 1)
    elif isinstance(value, tuple):
        for item in value:
            yield from _containers_in(item, depth + 1)


def _is_plain(value: Any) -> bool:
    """Whether it is an object of a user's class, whose attributes are its state."""
    kind = type(value)
    if isinstance(value, (Tensor, nn.Module, type)) or callable(value) or not hasattr(value, "__dict__"):
        return False
    return kind.__module__.partition(".")[0] not in _LIBRARIES


def _table_of(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else vars(value)


def _copied(container: Any) -> Any:
    if isinstance(container, np.ndarray):
        return container.copy()
    return list(container) if isinstance(container, (list, deque, set)) else dict(_table_of(container))


def _put_back(container: Any, items: Any) -> None:
    if isinstance(container, np.ndarray):
        container[...] = items
    elif isinstance(container, list):
        container[:] = items
    elif isinstance(container, deque):
        container.clear()
        container.extend(items)
    else:
        table = container if isinstance(container, set) else _table_of(container)
        table.clear()
        table.update(items)


def _contents(container: Any) -> Any:
    """What is equal as long as the container holds the same."""
    if isinstance(container, np.ndarray):
        return container.shape, container.tobytes()
    if isinstance(container, (list, deque)):
        return [_mark(item) for item in container]
    if isinstance(container, set):
        return {_mark(item) for item in container}
    return [(_mark(key), _mark(item)) for key, item in _table_of(container).items()]


def _mark(value: Any) -> Any:
    """What is equal as long as a value is the same object, of the same version, or the same number or text."""
    if isinstance(value, Tensor):
        return id(value), 0 if value.is_inference() else value._version
    if isinstance(value, (int, float, complex, str, bytes)):
        return type(value), repr(value)
    if isinstance(value, (tuple, frozenset)):
        return type(value), tuple(map(_mark, value))
    return id(value)
