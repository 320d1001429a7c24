"""Tell whether a step reads some tensors or attributes of its module."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memkit.memory.meter import storages_of, tensors_in


class ReadWatch(TorchDispatchMode):
    """While active, notes the operators' inputs, and the modules' attributes, that are among those watched.

    Compiled functions run eagerly in it.

    Args:
        module: the module.
        names: of what is watched, with the paths of its modules.
        tensors: watched as well, by their storages.

    Attributes:
        read: whether one of them was read.
    """

    supports_higher_order_operators = True

    def __init__(self, module: nn.Module, names: Iterable[str], tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.read = False
        self._attributes = list(dict.fromkeys(_attribute_of(module, name) for name in names))
        self._storages = {storage._cdata for tensor in tensors for storage in storages_of(tensor)}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context in which reads are noted."""
        compiles = "torch._dynamo" in sys.modules
        stance: AbstractContextManager[Any] = (
            torch.compiler.set_stance("force_eager") if compiles else nullcontext()
        )
        with stance, ExitStack() as stack:
            for owner in dict.fromkeys(owner for owner, _ in self._attributes):
                stack.enter_context(
                    self._trapped(owner, {name for one, name in self._attributes if one is owner})
                )
            with self:
                yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.read:
            given = tensors_in([args, kwargs or {}])
            self.read = any(s._cdata in self._storages for tensor in given for s in storages_of(tensor))
        return func(*args, **(kwargs or {}))

    @contextmanager
    def _trapped(self, owner: nn.Module, names: set[str]) -> Iterator[None]:
        """Give a module a class of the same name, which notes when one of its attributes is read."""
        kind = type(owner)

        def read(one: Any, name: str) -> Any:
            self.read = self.read or name in names
            return kind.__getattribute__(one, name)

        owner.__class__ = type(
            kind.__name__, (kind,), {"__getattribute__": read, "__module__": kind.__module__}
        )
        try:
            yield
        finally:
            owner.__class__ = kind


def _attribute_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds what has this name, and the attribute by which it does."""
    path = name.split(".")
    while len(path) > 1 and path[0] in module._modules and module._modules[path[0]] is not None:
        child = module._modules[path.pop(0)]
        assert child is not None
        module = child
    return module, path[0].partition("[")[0]
