"""Copies an optimizer over a few values of each parameter, to step it in a trial that leaves no trace.

Every tensor that the optimizer holds becomes its corner, at most 2 values a dimension, on the CPU and in
float64; an object referred to twice stays one object. Nothing of the parameters' size is allocated.
"""

import io
import pickle
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_memkit.optim.closures import is_our_replacement
from lightning_memkit.optim.methods import has_own_step
from lightning_memkit.optim.own_attributes import is_own

_VALUES_A_DIMENSION = 2
_DEFAULT_RATE = 1e-2


class NotCopiedError(TypeError):
    """An optimizer holds something that a small copy can't have."""


def tiny_copy(optimizer: Optimizer) -> Optimizer:
    """A copy whose parameters, states and buffers have at most 2 values a dimension; its learning rates are not 0.

    Raises:
        NotCopiedError: it holds a module, or a function that may refer to the parameters; or its step was
            replaced.
        Exception: whatever pickling its attributes raises.
    """
    if has_own_step(optimizer) and not is_our_replacement(optimizer.__dict__["step"]):
        raise NotCopiedError(
            f"{type(optimizer).__name__} has a step of its own, which would step the original."
        )
    written = io.BytesIO()
    pickler = _Pickler(written)
    pickler.dump(optimizer)
    written.seek(0)
    copied = _Unpickler(written, pickler.kept).load()
    for group in copied.param_groups:
        if "lr" in group and not group["lr"]:  # a warmup starts at 0, where all steps look alike
            group["lr"] = group.get("initial_lr") or copied.defaults.get("lr") or _DEFAULT_RATE
    return copied


class _Pickler(pickle.Pickler):
    """Pickles an optimizer; tensors become references to their corners, classes and functions to themselves."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.kept: list[Any] = []
        self._places: dict[int, int] = {}
        self._originals: list[Any] = []  # kept alive, so that no new object reuses an id

    def persistent_id(self, obj: Any) -> int | None:
        if isinstance(obj, nn.Module):
            raise NotCopiedError("A module is as large as the model.")
        if isinstance(obj, FunctionType) and obj.__closure__ is not None:
            raise NotCopiedError("A function's own variables may be the parameters.")
        if not isinstance(obj, (Tensor, type, ModuleType, FunctionType, BuiltinFunctionType)):
            return None
        if id(obj) not in self._places:
            self._places[id(obj)] = len(self.kept)
            self._originals.append(obj)
            self.kept.append(_corner(obj) if isinstance(obj, Tensor) else obj)
        return self._places[id(obj)]

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Optimizer):
            return NotImplemented
        # The class's own pickling leaves its other attributes out.
        kept = ("state", "param_groups", "defaults")
        state = {name: value for name, value in vars(obj).items() if name in kept or is_own(name)}
        return type(obj).__new__, (type(obj),), state


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, kept: list[Any]) -> None:
        super().__init__(file)
        self._kept = kept

    def persistent_load(self, pid: Any) -> Any:
        return self._kept[pid]


def _corner(tensor: Tensor) -> Tensor:
    corner = tensor.detach()[(slice(0, _VALUES_A_DIMENSION),) * tensor.dim()]
    dtype = torch.float64 if tensor.is_floating_point() else tensor.dtype
    corner = corner.to("cpu", dtype, copy=True).contiguous()
    if not isinstance(tensor, Parameter):
        return corner
    parameter = Parameter(corner, requires_grad=tensor.requires_grad)
    for name, value in vars(tensor).items():  # attributes that users set on parameters, such as rates
        if isinstance(value, (bool, int, float, str, Tensor)):
            setattr(parameter, name, _corner(value) if isinstance(value, Tensor) else value)
    return parameter
