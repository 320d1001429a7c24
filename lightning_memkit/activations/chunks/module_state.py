"""Notes what a module's forward may write besides its outputs, and puts it back."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_OWN = ("_parameters", "_buffers", "_modules")


class ModuleState:
    """The buffers and attributes of a module and of all within it.

    Objects of other kinds are known by identity: what a forward changes within them isn't seen.
    """

    def __init__(self, module: nn.Module) -> None:
        self._tables = [(name, part, dict(vars(part))) for name, part in module.named_modules()]
        self._buffers = [(part, dict(part._buffers)) for part in module.modules()]
        self._values = [(tensor, tensor.detach().clone()) for tensor in module.buffers()]
        self._lists = [(value, list(value)) for value in self._held() if isinstance(value, list)]
        self._dicts = [(value, dict(value)) for value in self._held() if isinstance(value, dict)]
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
        for kept, items in self._lists:
            kept[:] = items
        for kept, items in self._dicts:
            kept.clear()
            kept.update(items)
        for _, part, table in self._tables:
            vars(part).clear()
            vars(part).update(table)

    def _held(self) -> Iterator[Any]:
        for _, _, table in self._tables:
            yield from (value for name, value in table.items() if name not in _OWN)

    def _now(self) -> dict[str, Any]:
        marks = {}
        for name, part, _ in self._tables:
            values = {**part._buffers, **{key: value for key, value in vars(part).items() if key not in _OWN}}
            for key, value in values.items():
                marks[f"{name}.{key}" if name else key] = _mark(value)
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


def _mark(value: Any) -> Any:
    """What is equal as long as a value is."""
    if isinstance(value, Tensor):
        return id(value), 0 if value.is_inference() else value._version
    if isinstance(value, (int, float, complex, str, bytes)):
        return type(value), repr(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return id(value), len(value), tuple(map(id, value))
    if isinstance(value, dict):
        return id(value), tuple((id(key), id(one)) for key, one in value.items())
    return id(value)
