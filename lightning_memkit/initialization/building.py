"""Build any module on its device at its dtype, with the values that float32 initialisation would give."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_parameter_registration_hook

from lightning_memkit.initialization.lending import Lending, is_shared
from lightning_memkit.initialization.pages import move_values

_LOW_PRECISION = (torch.bfloat16, torch.float16)
_HIGH_PRECISION = (torch.float32, torch.float64)
_active = threading.local()


@contextmanager
def build_on(device: torch.device | str | int | None, dtype: torch.dtype = torch.float32) -> Iterator[None]:
    """Build modules directly on a device at a dtype; at most one float32 tensor is staged.

    Parameters have bitwise the values that plain float32 initialisation followed by a cast gives for the same
    seed and device. BatchNorm's affine vectors, buffers and computed tables keep the dtype that their
    constructor gives them: `casting.cast_module` decides about those afterwards.

    Why not simply a bfloat16 default dtype? It rounds every computed table (`torch.arange(0.0, 300.0)` ends
    296, 298, 300), makes running statistics and metric states bfloat16, and runs initialisers in bfloat16:
    orthogonal initialisation fails and truncated normals differ. Here the default dtype stays float32. A
    parameter is cast when it is registered, before its initialiser runs, and every later use of it inside the
    context works on a float32 copy that is written back before the next one is made. So the live float32
    bytes are at most those of the largest parameter, plus what an initialiser itself allocates; on a Linux
    host the parameter's own memory is not resident meanwhile.

    Args:
        device: where tensors are created; None leaves the current default device.
        dtype: of the parameters. float32 and float64 become the default dtype and need no staging.

    Raises:
        ValueError: the dtype is not a floating dtype for training, or another dtype's context is open.

    Limits: a parameter computed from another one sees that one's rounded values, and so does an initialiser
    that creates tensors between two writes to its parameter. A parameter that shares its storage with another
    tensor stays float32 until that tensor is gone, at the latest until the context ends. `Tensor.set_` on a
    parameter (`parametrizations.orthogonal`) fails: apply it after the context. Modules built in other
    threads are not covered.
    """
    with _building(device, dtype, empty=False):
        yield


@contextmanager
def build_empty(
    device: torch.device | str | int | None, dtype: torch.dtype = torch.float32
) -> Iterator[None]:
    """Modules constructed inside have parameters without memory (on the meta device), but real buffers.

    Rotary tables, masks and position ids are those of plain construction, and ties stay tied. A parameter
    whose constructor computes its values has memory until the module registers it. Give the parameters memory
    and values with `load_weights(module, ..., device=)` or `materialize(module, device)`. Shard first if the
    module is to be sharded: then each rank allocates only its shard.

    Args:
        device: where buffers are created; None leaves the current default device.
        dtype: of the parameters, as in `build_on`.

    Raises:
        ValueError: as in `build_on`.

    Limits: a buffer that a constructor computes from a parameter has no memory either; `materialize` names it
    unless an initialiser fills it.
    """
    with _building(device, dtype, empty=True):
        yield


def settle() -> None:
    """Round an open `build_on`'s float32 copies into their parameters, to make these usable."""
    staging: _Staging | None = getattr(_active, "staging", None)
    if staging is not None:
        staging.settle()


@contextmanager
def known_by_nobody(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Drop an open `build_on`'s weak references to these tensors for a while, so that torch can swap them."""
    staging: _Staging | None = getattr(_active, "staging", None)
    lent = [] if staging is None else [tensor for tensor in tensors if tensor in staging._lent]
    for tensor in lent:
        del staging._lent[tensor]  # pyright: ignore[reportOptionalMemberAccess]
    try:
        yield
    finally:
        for tensor in lent:
            staging._lent[tensor] = None  # pyright: ignore[reportOptionalMemberAccess]


@contextmanager
def _building(device: torch.device | str | int | None, dtype: torch.dtype, empty: bool) -> Iterator[None]:
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
        if outer is None and (empty or dtype in _LOW_PRECISION):
            place = None if device is None else torch.device(device)
            stack.enter_context(_staging(_Staging(place, dtype, empties=empty)))
        elif outer is not None and empty:
            stack.enter_context(outer.on_meta())
        yield


@contextmanager
def _staging(staging: "_Staging") -> Iterator[None]:
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


class _Staging(Lending):
    """Keeps parameters at the target dtype and lends a float32 copy of one of them at a time.

    Attributes:
        dtype: the parameters' target dtype.
    """

    def __init__(self, device: torch.device | None, dtype: torch.dtype, *, empties: bool = False) -> None:
        super().__init__()
        self.dtype = dtype
        self._empties = empties  # free the memory of parameters when they are registered
        self._device = device
        self._thread = threading.get_ident()
        self._shared: list[nn.Parameter] = []  # still float32, because another tensor shares their storage

    def on_registration(self, module: nn.Module, name: str, parameter: Any) -> None:
        """Cast a parameter that a module registers; it stays the same object, so ties stay tied."""
        if threading.get_ident() != self._thread:
            return
        with torch._C.DisableTorchFunction():
            self.write_back()
            # Under Lightning's "bf16-true" bfloat16 is the default dtype, and initialisers would draw other
            # numbers than rounded float32 ones: lend such parameters, too.
            low = self._empties or torch.get_default_dtype() == self.dtype
            wide = low and getattr(parameter, "dtype", None) == self.dtype
            if (_castable(parameter) or wide) and not isinstance(module, _NormBase):
                self._cast_or_wait(parameter)
            elif self._empties and isinstance(parameter, nn.Parameter) and not parameter.is_meta:
                _to_meta(parameter, parameter.dtype)

    def deepcopy(self, copy: Callable[[Any, dict], Any], parameter: nn.Parameter, memo: dict) -> nn.Parameter:
        """Copy a parameter at its own dtype: modules that clone their layers don't register the copies."""
        if threading.get_ident() != self._thread:
            return copy(parameter, memo)
        with torch._C.DisableTorchFunction():
            self.write_back()
            twin = copy(parameter, memo)
            if parameter in self._lent:
                self._lent[twin] = True
            elif _castable(twin):
                self._cast_or_wait(twin)
        return twin

    @contextmanager
    def on_meta(self) -> Iterator[None]:
        """Within the context, registered parameters get no memory."""
        self._empties, before = True, self._empties
        try:
            yield
        finally:
            self._empties = before

    def close(self) -> None:
        """Write the last copy back and cast parameters that are still waiting."""
        self.write_back()
        for parameter in self._shared:
            self._cast(parameter)
        self._copies.clear()
        self._shared.clear()
        self._lent.clear()  # weak references would prevent swapping memory into parameters later

    def on_set(self, func: Any, args: tuple) -> Any:
        """For `parameter.data = ...`: new values replace the copy, and are cast like a new parameter."""
        parameter = args[0]
        self.write_back()
        self._copies = [(other, copy) for other, copy in self._copies if other is not parameter]
        out = func(parameter, args[1].to("meta")) if parameter.is_meta else func(*args)
        if parameter.dtype != self.dtype:
            del self._lent[parameter]
            if _castable(parameter):
                self._cast_or_wait(parameter)
        return out

    def lend(self, parameter: nn.Parameter) -> Tensor:
        """A float32 copy to write to; meanwhile an unshared parameter's own memory is not resident."""
        if self._lent[parameter] != parameter.data_ptr() or is_shared(parameter):
            return self.whole(parameter)  # someone may read the parameter
        copy = torch.empty_like(parameter.detach(), dtype=torch.float32)
        move_values(parameter.detach(), copy)
        return copy

    def take(self, parameter: nn.Parameter, copy: Tensor) -> None:
        """Round a copy that nobody else holds into its parameter."""
        move_values(copy, parameter.detach())

    def write_back(self) -> None:
        """Round the copies into their parameters, and cast parameters whose aliases are gone."""
        super().write_back()
        waiting, self._shared = self._shared, []
        for parameter in waiting:
            self._cast_or_wait(parameter)

    def _cast_or_wait(self, parameter: nn.Parameter) -> None:
        # An alias may still be initialised: casting now would cut it off from the parameter.
        if is_shared(parameter):
            self._shared.append(parameter)
        else:
            self._cast(parameter)

    def _cast(self, parameter: nn.Parameter) -> None:
        made = None
        if self._empties and not parameter.is_meta:
            _to_meta(parameter, self.dtype)
        elif parameter.is_meta:
            parameter.data = parameter.data.to(self.dtype)
        else:
            values = parameter.data
            parameter.data = values.to(device=self._device, dtype=self.dtype)
            made = parameter.data_ptr() if parameter.data_ptr() != values.data_ptr() else None
        self._lent[parameter] = made  # memory that a cast has allocated belongs to this parameter alone


def _castable(parameter: Any) -> bool:
    return (
        type(parameter) is not nn.UninitializedParameter
        and isinstance(parameter, nn.Parameter)
        and parameter.dtype == torch.float32
    )


def _to_meta(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Free a parameter's memory; it stays the same object."""
    if type(parameter) is not nn.UninitializedParameter:
        bare = torch.empty_like(parameter.data, device="meta", dtype=dtype)
        empty = torch.Tensor._make_subclass(type(parameter), bare, parameter.requires_grad)
        vars(empty).update(vars(parameter))
        torch.utils.swap_tensors(parameter, empty)
