"""What operators return for fake tensors, looked up by their operands."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# Fake kernels of other operators may do anything, and a fork may be alone in having these.
_NAMESPACES = ("aten", "prims")
_BY_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
_LIFTS = {torch.ops.aten.lift, torch.ops.aten.lift_fresh, torch.ops.aten.lift_fresh_copy}
_NUMBERS = (bool, int, float, complex)  # 1, 1.0 and True are equal, and give results of other dtypes
_NAMES = (str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))

Key = tuple[Any, ...]
_MakesFake = Callable[[Tensor, torch.device], FakeTensor]


@dataclass(frozen=True, slots=True)
class _SameOperand:
    """A result that is an operand itself, by its place among all operands that are tensors."""

    place: int

    def made(self, fake: _MakesFake, tensors: Sequence[Tensor]) -> Any:
        return tensors[self.place]


@dataclass(frozen=True, slots=True)
class _PlainResult:
    """A result that is no tensor."""

    value: Any

    def made(self, fake: _MakesFake, tensors: Sequence[Tensor]) -> Any:
        return self.value


@dataclass(frozen=True, slots=True)
class _LaidOut:
    """A result of its own memory; with `place`, a view of that operand."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    place: int | None

    def made(self, fake: _MakesFake, tensors: Sequence[Tensor]) -> Any:
        with torch._C._DisableTorchDispatch():
            bare = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
            if self.place is not None:
                bare.set_(tensors[self.place].untyped_storage(), self.offset, self.shape, self.stride)
        return fake(bare, self.device)


_Result = _SameOperand | _PlainResult | _LaidOut


@dataclass(frozen=True, slots=True)
class _KnownOutcome:
    """What an operator returns for operands of a key; several results are a list or a tuple."""

    results: tuple[_Result, ...]
    several: type | None

    def made(self, fake: _MakesFake, tensors: Sequence[Tensor]) -> Any:
        if self.several is None:
            return self.results[0].made(fake, tensors)
        return self.several(one.made(fake, tensors) for one in self.results)


Found = dict[Key, _KnownOutcome | None]  # None for an operator that has to run each time


class KnownResults:
    """Runs operators on fake tensors; those whose operands look as others did return what these returned.

    torch has such a cache for operands of any kind; finding an entry in it took most of a prediction's time, and
    what it holds ends with the process. What does not follow from shapes, strides, dtypes and plain arguments runs
    each time.

    Args:
        mode: the mode of the fake tensors.

    Attributes:
        key: of the operator that ran last, the same for all that look alike; None where it has none.
        misses: how many operators were not known.
        found: what is known; it may be that of earlier simulations.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.key: Key | None = None
        self.misses = 0
        self.found: Found = {}
        self._mode = mode
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operator's result."""
        tensors: list[Tensor] = []
        with torch._C.DisableTorchFunction():  # a mode would see each look at a shape
            key = self.key = self._key(func, args, kwargs, tensors)
            outcome = None if key is None else self.found.get(key)
            if outcome is not None:
                return outcome.made(self._fake, tensors)
        out = func(*args, **kwargs)
        if key is not None and key not in self.found:
            self.misses += 1
            with torch._C.DisableTorchFunction():
                # An operator may have changed the shape of an operand.
                is_plain = self._key(func, args, kwargs, []) == key
                self.found[key] = self._learned(func, out, tensors) if is_plain else None
        return out

    def _key(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Key | None:
        """What its results follow from; None where something else may decide. Its operands are added to `tensors`."""
        if not isinstance(func, OpOverload) or func.namespace not in _NAMESPACES:
            return None
        parts: list[Any] = [func.name(), torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        if not self._note(args, parts, tensors):
            return None
        for name, value in kwargs.items():
            parts.append(name)
            if not self._note((value,), parts, tensors):
                return None
        return tuple(parts)

    def _fake(self, bare: Tensor, device: torch.device) -> FakeTensor:
        """The fake tensor of one on the meta device: made by its class once, and as that was made from then on."""
        attributes = self._attributes.get(device)
        if attributes is None:
            one = FakeTensor(self._mode, bare, device)
            self._attributes[device] = dict(vars(one))
            return one
        one: Any = Tensor._make_subclass(
            FakeTensor, bare, False, dispatch_device=True, device_for_backend_keys=device
        )
        if self._mode._allow_unsafe_data_ptr_access:  # an address is 0, and not an error
            torch._C._set_warn_deprecated_on_mutable_data_ptr(one)
        else:
            torch._C._set_throw_on_mutable_data_ptr(one)
        vars(one).update(attributes)
        return one

    def _note(self, items: Sequence[Any], parts: list[Any], tensors: list[Tensor]) -> bool:
        for item in items:
            kind = type(item)
            if kind is FakeTensor:
                if item.fake_mode is not self._mode or item.constant is not None:
                    return False
                if item.layout is not torch.strided:
                    return False
                tensors.append(item)
                parts += (
                    item.dtype, item.shape, item.stride(), item.storage_offset(), item.untyped_storage().nbytes(),
                    item.requires_grad, item.is_conj(), item.is_neg(), item.is_inference(), item.fake_device,
                )  # fmt: skip
            elif kind in _NUMBERS:
                parts += (kind, item)
            elif kind in _NAMES:
                parts.append(item)
            elif kind is list or kind is tuple:
                parts += (kind, len(item))
                if not self._note(item, parts, tensors):
                    return False
            else:
                return False
        return True

    def _learned(self, func: OpOverload, out: Any, tensors: Sequence[Tensor]) -> _KnownOutcome | None:
        """What operators of this key return; None where that can't be told, or would not be the same."""
        if func.overloadpacket in _LIFTS:
            return None
        if any(tag in func.tags for tag in _BY_VALUES) and not _is_plain_index(func, tensors):
            return None
        several = type(out) if type(out) in (list, tuple) else None
        results = []
        for one in out if several else (out,):
            result = self._result(one, tensors)
            if result is None:
                return None
            results.append(result)
        return _KnownOutcome(tuple(results), several)

    def _result(self, out: Any, tensors: Sequence[Tensor]) -> _Result | None:
        if type(out) in (*_NUMBERS, type(None)):
            return _PlainResult(out)
        place = next((place for place, one in enumerate(tensors) if one is out), None)
        if place is not None:
            return _SameOperand(place)
        if type(out) is not FakeTensor or out.constant is not None or out.layout is not torch.strided:
            return None
        storage = out.untyped_storage()._cdata
        place = next((i for i, one in enumerate(tensors) if one.untyped_storage()._cdata == storage), None)
        shape, stride = tuple(out.shape), tuple(out.stride())
        result = _LaidOut(shape, stride, int(out.storage_offset()), out.dtype, out.fake_device, place)
        return result if _are_alike(result.made(self._fake, tensors), out) else None


def _is_plain_index(func: OpOverload, tensors: Sequence[Tensor]) -> bool:
    """Whether the result's shape follows from that of the indices: no mask is among them."""
    return func is torch.ops.aten.index.Tensor and all(
        one.dtype not in (torch.bool, torch.uint8, torch.int8) for one in tensors[1:]
    )


def _are_alike(one: Tensor, other: Tensor) -> bool:
    return tuple(_traits(one)) == tuple(_traits(other))


def _traits(tensor: Tensor) -> Iterator[Any]:
    yield torch._C._dispatch_key_set(tensor)
    yield from (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.requires_grad)
    yield from (tensor.is_conj(), tensor.is_neg(), tensor.is_inference(), tensor.untyped_storage().nbytes())
