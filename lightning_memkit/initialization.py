"""Build any module on its device at its dtype, with the values that float32 initialisation would have given."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

_LOW_PRECISION = (torch.bfloat16, torch.float16)
_HIGH_PRECISION = (torch.float32, torch.float64)
_STAGED_NAMES = frozenset({"data", "T", "mT", "H", "mH"})  # properties that give an alias of the values
_METADATA = frozenset(
    "size dim ndimension numel nelement stride element_size storage_offset is_contiguous is_floating_point "
    "is_complex is_same_size get_device requires_grad_ register_hook register_post_accumulate_grad_hook "
    "untyped_storage data_ptr is_shared __hash__ __len__ __repr__ __format__ __reduce_ex__".split()
)
_FACTORIES = frozenset(
    getattr(torch, name)
    for name in (
        "empty empty_like empty_strided zeros zeros_like ones ones_like full full_like rand rand_like randn "
        "randn_like normal tensor as_tensor eye linspace logspace arange from_numpy"
    ).split()
)
_active = threading.local()


@contextmanager
def build_on(device: torch.device | str | int | None, dtype: torch.dtype = torch.float32) -> Iterator[None]:
    """Modules constructed inside live on a device at a dtype at once; at most one float32 tensor is staged.

    Parameters have bitwise the values that plain float32 initialisation followed by a cast gives for the same
    seed and device. BatchNorm's affine vectors, buffers and computed tables keep the dtype that their
    constructor gives them: `casting.cast_module` decides about those afterwards.

    Why not simply a bfloat16 default dtype? It rounds every computed table (`torch.arange(0.0, 300.0)` ends
    296, 298, 300), makes running statistics and metric states bfloat16, and runs initialisers in bfloat16:
    orthogonal initialisation fails and truncated normals differ. Here the default dtype stays float32. A
    parameter is cast when it is registered, before its initialiser runs, and every later use of it inside the
    context works on a float32 copy that is written back before the next one is made. So the float32 bytes
    alive are at most those of the largest parameter, plus what an initialiser itself allocates.

    Args:
        device: where tensors are created; None leaves the current default device.
        dtype: of the parameters. float32 and float64 become the default dtype and need no staging.

    Raises:
        ValueError: the dtype is not a floating dtype for training, or another dtype's context is open.

    Limits: a parameter computed from another one sees that one's rounded values, and so does an initialiser
    that creates tensors between two writes to its parameter. A parameter that shares its storage with another
    tensor stays float32 until that tensor is gone, at the latest until the context ends. `Tensor.set_` on a
    parameter (`parametrizations.orthogonal`) fails: apply it after the context. Modules that build in other
    threads are not covered.
    """
    if dtype not in (*_LOW_PRECISION, *_HIGH_PRECISION):
        raise ValueError(f"dtype={dtype} can't hold trainable parameters; use bfloat16, float16 or float32.")
    outer: _Staging | None = getattr(_active, "staging", None)
    if outer is not None and outer.dtype != dtype:
        raise ValueError(f"build_on({dtype}) inside build_on({outer.dtype}): a module has one target dtype.")
    with ExitStack() as stack:
        if device is not None:
            stack.enter_context(torch.device(device))
        if outer is None:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(dtype if dtype in _HIGH_PRECISION else torch.float32)
            if dtype in _LOW_PRECISION:
                stack.enter_context(_staging(None if device is None else torch.device(device), dtype))
        yield


@contextmanager
def _staging(device: torch.device | None, dtype: torch.dtype) -> Iterator[None]:
    staging = _Staging(device, dtype)
    handle = register_module_parameter_registration_hook(staging.on_registration)
    copy = nn.Parameter.__deepcopy__
    twin = lambda parameter, memo: staging.deepcopy(copy, parameter, memo)  # noqa: E731
    nn.Parameter.__deepcopy__ = twin  # pyright: ignore[reportAttributeAccessIssue]
    _active.staging = staging
    try:
        with staging:
            yield
    finally:
        _active.staging = None
        nn.Parameter.__deepcopy__ = copy
        handle.remove()
        staging.close()


class _Staging(TorchFunctionMode):
    """Keeps parameters at the target dtype and lends a float32 copy of one of them at a time.

    Attributes:
        dtype: the parameters' target dtype.
    """

    def __init__(self, device: torch.device | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self._device = device
        self._thread = threading.get_ident()
        self._staged = WeakIdKeyDictionary()  # parameters at the target dtype, by identity
        self._shared: list[nn.Parameter] = []  # still float32: another tensor holds their storage
        self._copies: list[tuple[nn.Parameter, Tensor]] = []  # float32 copies not yet dropped

    def on_registration(self, module: nn.Module, name: str, parameter: Any) -> None:
        """Cast a parameter that a module registers; the object stays the same, so ties stay tied."""
        if threading.get_ident() != self._thread:
            return
        with torch._C.DisableTorchFunction():
            self._write_back()
            if _castable(parameter) and not isinstance(module, _NormBase):
                self._cast_or_wait(parameter)

    def deepcopy(self, copy: Callable[[Any, dict], Any], parameter: nn.Parameter, memo: dict) -> nn.Parameter:
        """Copy a parameter at its own dtype: modules that clone their layers register nothing."""
        if threading.get_ident() != self._thread:
            return copy(parameter, memo)
        with torch._C.DisableTorchFunction():
            self._write_back()
            twin = copy(parameter, memo)
            if parameter in self._staged:
                self._staged[twin] = True
            elif _castable(twin):
                self._cast_or_wait(twin)
        return twin

    def close(self) -> None:
        """Write the last copy back and cast what waited."""
        self._write_back()
        for parameter in self._shared:
            self._cast(parameter)
        self._copies.clear()
        self._shared.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        parameters = [value for value in _flat(args, kwargs) if self._is_staged(value)]
        if not parameters:
            if func in _FACTORIES:
                self._write_back()
            return func(*args, **kwargs)
        name = func.__name__
        if name == "__set__":
            return self._replace_values(func, args)
        if sys._getframe(1).f_globals.get("__name__", "").startswith("torch.distributed"):
            self._write_back()  # sharding takes the parameters as they are, not to initialise them
            return func(*args, **kwargs)
        field = func.__self__.__name__ if name == "__get__" else ""
        if field == "dtype":
            return torch.float32  # constructors compute in the dtype that they see
        if name in _METADATA or (field and field not in _STAGED_NAMES):
            return func(*args, **kwargs)
        written = parameters[0]
        copy = self._copy_of(written)
        replaced = {id(value): value.float() for value in parameters[1:] if value is not written}
        replaced[id(written)] = copy
        out = func(*_replace(args, replaced), **_replace(kwargs, replaced))
        in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
        return written if out is copy and in_place else out

    def _is_staged(self, value: Any) -> bool:
        return isinstance(value, nn.Parameter) and value in self._staged

    def _replace_values(self, func: Any, args: tuple) -> Any:
        """Such as `parameter.data = ...`: new values take the copy's place and are cast in their turn."""
        parameter = args[0]
        self._write_back()
        self._copies = [(other, copy) for other, copy in self._copies if other is not parameter]
        out = func(*args)
        if parameter.dtype != self.dtype:
            del self._staged[parameter]
            if _castable(parameter):
                self._cast_or_wait(parameter)
        return out

    def _copy_of(self, parameter: nn.Parameter) -> Tensor:
        index = next((i for i, (known, _) in enumerate(self._copies) if known is parameter), None)
        if index is None:
            self._write_back()  # before the new copy is made, so that one is alive at a time
            self._copies.append((parameter, parameter.detach().float()))
            index = -1
        return self._copies[index][1]

    def _write_back(self) -> None:
        """Round the copies into their parameters; keep only those that someone else still holds an alias of."""
        kept = []
        for parameter, copy in self._copies:
            parameter.detach().copy_(copy)
            if _is_shared(copy):
                kept.append((parameter, copy))
        self._copies = kept
        waiting, self._shared = self._shared, []
        for parameter in waiting:
            self._cast_or_wait(parameter)

    def _cast_or_wait(self, parameter: nn.Parameter) -> None:
        # An alias may still be initialised: casting now would cut it off from the parameter.
        if _is_shared(parameter):
            self._shared.append(parameter)
        else:
            self._cast(parameter)

    def _cast(self, parameter: nn.Parameter) -> None:
        parameter.data = parameter.data.to(device=self._device, dtype=self.dtype)
        self._staged[parameter] = True


def _castable(parameter: Any) -> bool:
    return (
        type(parameter) is not nn.UninitializedParameter
        and isinstance(parameter, nn.Parameter)
        and parameter.dtype == torch.float32
    )


def _is_shared(tensor: Tensor) -> bool:
    """Whether tensors other than this one hold its storage."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    # Two uses are ours: the tensor's own and the Python storage's.
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
