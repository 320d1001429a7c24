"""Lend a float32 copy of one parameter at a time to code that initialises it, and write it back."""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from lightning_memkit.initialization.pages import drop_pages

_ALIASES = frozenset({"data", "T", "mT", "H", "mH"})  # properties that return an alias of the values
_METADATA = frozenset(
    "size dim ndimension numel nelement stride element_size storage_offset is_contiguous is_floating_point "
    "is_complex is_same_size get_device requires_grad_ register_hook register_post_accumulate_grad_hook "
    "is_shared __hash__ __len__".split()
)
_WHOLE = frozenset("untyped_storage data_ptr __repr__ __format__ __reduce_ex__".split())  # the memory itself
_OWN_REFERENCES = 2  # one by the pair, one by the call of getrefcount
_FACTORIES = frozenset(
    getattr(torch, name)
    for name in (
        "empty empty_like empty_strided zeros zeros_like ones ones_like full full_like rand rand_like randn "
        "randn_like normal tensor as_tensor eye linspace logspace arange from_numpy"
    ).split()
)


class Lending(TorchFunctionMode):
    """Within it, code that uses a lent parameter works on a float32 copy, written back before the next one.

    Subclasses decide which parameters are lent, and may decide how copies are made and written back.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lent = WeakIdKeyDictionary()  # lent parameters, by identity
        self._copies: list[tuple[nn.Parameter, Tensor]] = []  # float32 copies still in use

    def whole(self, parameter: nn.Parameter) -> Tensor:
        """A copy of a parameter, to read or write."""
        return parameter.detach().to(_wide(parameter), copy=True)

    def lend(self, parameter: nn.Parameter) -> Tensor:
        """A copy of a parameter to write to; nobody reads the parameter itself meanwhile."""
        return self.whole(parameter)

    def put(self, parameter: nn.Parameter, copy: Tensor) -> None:
        """Write a copy's values back; someone may still hold the copy."""
        parameter.detach().copy_(copy)

    def take(self, parameter: nn.Parameter, copy: Tensor) -> None:
        """Write the values of a copy that nobody else holds back, and drop it."""
        self.put(parameter, copy)
        drop_pages(copy)

    def on_set(self, func: Any, args: tuple) -> Any:
        """Handle `parameter.data = values`."""
        return func(*args)

    def settle(self) -> None:
        """Write copies back and forget them, even if aliases exist; later writes to an alias are lost."""
        self.write_back()
        self._copies.clear()

    def write_back(self) -> None:
        """Round the copies into their parameters; keep only copies of which someone still holds an alias."""
        kept = []
        for pair in self._copies:
            if is_shared(pair[1]) or sys.getrefcount(pair[1]) > _OWN_REFERENCES:
                self.put(*pair)
                kept.append(pair)
            else:
                self.take(*pair)
        self._copies = kept

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        parameters = [value for value in _flat(args, kwargs) if self._is_lent(value)]
        if not parameters:
            if func in _FACTORIES:
                self.write_back()
            return func(*args, **kwargs)
        name = func.__name__
        if name == "__set__":
            return self.on_set(func, args)
        if sys._getframe(1).f_globals.get("__name__", "").startswith("torch.distributed"):
            self.write_back()  # sharding needs the parameters themselves
            return func(*args, **kwargs)
        if name in _WHOLE:
            self.write_back()
            return func(*args, **kwargs)
        field = func.__self__.__name__ if name == "__get__" else ""
        if field == "dtype":
            return _wide(parameters[0])  # constructors compute in the dtype that is reported here
        if name in _METADATA or (field and field not in _ALIASES):
            return func(*args, **kwargs)
        written = parameters[0]
        copy = self._copy_of(written)
        replaced = {id(value): self._values_of(value) for value in parameters[1:] if value is not written}
        replaced[id(written)] = copy
        out = func(*_replace(args, replaced), **_replace(kwargs, replaced))
        in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
        return written if out is copy and in_place else out

    def _is_lent(self, value: Any) -> bool:
        return isinstance(value, nn.Parameter) and value in self._lent

    def _copy_of(self, parameter: nn.Parameter) -> Tensor:
        copy = self._lent_copy(parameter)
        if copy is None:
            self.write_back()  # before the new copy is made, so that only one is alive
            copy = self.lend(parameter)
            self._copies.append((parameter, copy))
        return copy

    def _values_of(self, parameter: nn.Parameter) -> Tensor:
        """A copy to read, rounded like the parameter."""
        copy = self._lent_copy(parameter)
        return self.whole(parameter) if copy is None else copy.to(parameter.dtype).to(copy.dtype)

    def _lent_copy(self, parameter: nn.Parameter) -> Tensor | None:
        return next((copy for known, copy in self._copies if known is parameter), None)


def _wide(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


def is_shared(tensor: Tensor) -> bool:
    """Whether other tensors share this one's storage."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    # Two uses don't count: the tensor's own, and that of the Python storage object made here.
    return count is not None and count(tensor.untyped_storage()._cdata) > 2


def _flat(args: tuple, kwargs: dict[str, Any]) -> Iterator[Any]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


def _replace(value: Any, replaced: dict[int, Tensor]) -> Any:
    if isinstance(value, dict):
        return {key: _replace(item, replaced) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replace(item, replaced) for item in value)
    return replaced.get(id(value), value)
