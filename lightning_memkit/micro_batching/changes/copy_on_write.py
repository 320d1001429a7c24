"""Copy tensors to the host just before an operator first writes to them; costs the bytes that change."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import Self

from lightning_memkit.memory.meter import storages_of, tensors_in
from lightning_memkit.utilities.tensors import is_wrapper, storage_is_freed

# Batch normalization's operators write to these arguments, though their schema does not mark them as written.
_WRITTEN_UNSAID = ("running_mean", "running_var")


class CopyOnWrite(TorchDispatchMode):
    """While active, copies watched tensors to the host before they are written to; microseconds an operator.

    The operator's schema tells which arguments it writes to: the tensor itself, a view of it, its `.data`, or
    a list with it. Writes past the dispatcher (by a kernel that has a raw pointer) are not seen.

    Args:
        tensors: the tensors to watch; they may share storages.

    Attributes:
        copies: the former values of each tensor that was written to, by the tensor's `id`.
    """

    supports_higher_order_operators = True

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.copies: dict[int, Tensor] = {}
        self._watched: dict[int, list[Tensor]] = {}
        self._stances: list[AbstractContextManager[Any]] = []
        for tensor in tensors:
            for storage in storages_of(tensor):
                self._watched.setdefault(storage._cdata, []).append(tensor)

    def __enter__(self) -> Self:
        # A compiled function's kernels write without dispatching operators: run it eagerly.
        compiles = "torch._dynamo" in sys.modules
        stance = torch.compiler.set_stance("force_eager") if compiles else nullcontext()
        stance.__enter__()
        self._stances.append(stance)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._stances.pop().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in _written(func, args, kwargs):
            for storage in storages_of(tensor):
                for watched in self._watched.pop(storage._cdata, ()):
                    if id(watched) not in self.copies and not storage_is_freed(watched):
                        self.copies[id(watched)] = copy_of(watched)
        return func(*args, **kwargs)


def copy_of(tensor: Tensor) -> Tensor:
    """A copy on the host; of a tensor subclass (a sharded tensor, say), on its own device."""
    if is_wrapper(tensor):
        return tensor.detach().clone()
    with torch.inference_mode(tensor.is_inference()):
        return tensor.detach().to("cpu", copy=True)


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operator is about to write to."""
    positions, names = _places(func)
    for position in positions:
        if position < len(args):
            yield from tensors_in(args[position])
    for name in names:
        if name in kwargs:
            yield from tensors_in(kwargs[name])


@cache
def _places(func: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The positions and names of the arguments that an operator writes to."""
    schema = getattr(func, "_schema", None)
    if schema is None:  # a higher-order operator; what runs within it is dispatched by itself
        return (), ()
    written = [
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or (argument.name in _WRITTEN_UNSAID and "backward" not in schema.name)
    ]
    return tuple(place for place, _ in written), tuple(name for _, name in written)
