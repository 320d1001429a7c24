"""Values for fake tensors: computed if they follow from the batch's integers, plausible ones otherwise.

A step on fake tensors knows only shapes, but control flow asks for values: how many labels count, where a
document ends, whether a mask is all ones. Most of them follow from integers of the batch by small operators,
which are also run on real tensors. Values that follow from floating-point values are unknown; if a step asks
for one, it gets what a healthy step would have: finite losses, experts with equal loads, masks that keep
everything.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_memkit.memory.meter import tensors_in, unmetered
from lightning_memkit.memory.origins import describe, place
from lightning_memkit.prediction.operator_traits import traits_of
from lightning_memkit.prediction.shapes import SHAPES
from lightning_memkit.utilities.errors import PredictionError

# The largest tensors whose values are tracked: integers and booleans determine control flow, floats hardly
# ever do.
_MOST_BYTES, _MOST_BYTES_OF_NUMBERS = 1 << 24, 1 << 16
_MASKS_KEEP_ALL = "masks that depend on floating-point values keep everything"
_EQUAL_SHARES = "choices by floating-point values (experts, sorting) fall evenly"

_aten = torch.ops.aten
# The position of the indices among their results.
_CHOOSES = {
    _aten.topk: 1, _aten.sort: 1, _aten.max: 1, _aten.min: 1, _aten.argmax: 0, _aten.argmin: 0, _aten.argsort: 0,
    _aten.multinomial: 0,
}  # fmt: skip
_TRUE_WHEN_HEALTHY = {_aten.all, _aten.isfinite}
_UNSCALES = _aten._amp_foreach_non_finite_check_and_unscale_


def _plain_call(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


class KnownValues:
    """Runs operators on fake tensors, and also on real ones if their values are known and small.

    Args:
        convert: makes the fake twin of a real tensor.
        call: runs an operator on fake tensors.

    Attributes:
        assumed: each assumption, with the line that needed it first.
        asked: how often a step has asked for values: read a number, or made a result of a size that they decide.
    """

    def __init__(
        self, convert: Callable[[Tensor], Tensor], call: Callable[[Any, Any, Any], Any] = _plain_call
    ) -> None:
        self.assumed: dict[str, str] = {}
        self.asked = 0
        self._convert, self._call = convert, call
        self._values: dict[int, tuple[Any, Tensor]] = {}  # by fake storage: the bytes of its values

    def know(self, fake: Tensor, real: Tensor) -> None:
        """Set the values of a fake tensor; an operator that overwrites it with unknown values clears them."""
        storage = fake.untyped_storage()
        if storage.nbytes() == 0 or not _may_follow(fake) or real.layout is not torch.strided:
            return
        with unmetered(), torch.no_grad():
            known = self._known_bytes(storage)
            if known is None:
                key = storage._cdata
                known = torch.zeros(storage.nbytes(), dtype=torch.uint8)
                self._values[key] = (weakref.ref(storage, lambda _: self._values.pop(key, None)), known)
            _laid_out_as(fake, known).copy_(real.detach())

    def of(self, fake: Tensor) -> Tensor | None:
        """A real tensor with a fake one's values, shape and strides; None if they are unknown."""
        if fake.layout is not torch.strided:
            return None
        known = self._known_bytes(fake.untyped_storage())
        if known is None:
            return None
        with unmetered():
            return _laid_out_as(fake, known)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator's result for fake tensors, with values if they are known."""
        traits = traits_of(func)
        if traits.is_view:
            return self._call(func, args, kwargs)
        if func is _aten._local_scalar_dense.default:
            return self._scalar(args[0])
        with torch._C.DisableTorchFunction():  # a mode would see each look at a tensor
            knows = traits.follows and (traits.of_shape_alone or self._are_known(args, kwargs))
        if func is _aten.equal.default:
            return self._really(func, args, kwargs) if knows else True
        if traits.has_open_shape and _takes_shape_from_values(func, args):
            return self._of_unknown_size(func, args, kwargs)
        out = SHAPES[func](*args, **kwargs) if func in SHAPES else self._call(func, args, kwargs)
        made = tensors_in(out)
        if knows and made and all(_may_follow(tensor) for tensor in made):
            self._follow(func, args, kwargs, made)
            return out
        with torch._C.DisableTorchFunction():
            for tensor in traits.written_to(args, kwargs):
                self._values.pop(tensor.untyped_storage()._cdata, None)
            self._assume(func, args, kwargs, made)
        return out

    def _are_known(self, args: Any, kwargs: Any) -> bool:
        given = (args, *kwargs.values()) if kwargs else args
        return all(self._is_known(tensor) for tensor in tensors_in(given))

    def _is_known(self, tensor: Tensor) -> bool:
        return tensor.layout is torch.strided and self._known_bytes(tensor.untyped_storage()) is not None

    def _known_bytes(self, storage: torch.UntypedStorage) -> Tensor | None:
        entry = self._values.get(storage._cdata)
        return None if entry is None or entry[1].numel() != storage.nbytes() else entry[1]

    def _really(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator's result for real values; operands without known values have only a shape."""
        real_args, real_kwargs = tree_map_only(Tensor, self._real, (tuple(args), dict(kwargs)))
        if "device" in real_kwargs:
            real_kwargs["device"] = torch.device("cpu")
        with unmetered(), torch.no_grad():
            return func(*real_args, **real_kwargs)

    def _real(self, fake: Tensor) -> Tensor:
        real = self.of(fake)
        if real is not None:
            return real
        with unmetered():
            return torch.empty((), dtype=fake.dtype).expand(fake.shape)

    def _follow(self, func: Any, args: Any, kwargs: Any, made: Sequence[Tensor]) -> None:
        """Also run the operator on real tensors; a write changes the known values of all views."""
        real = self._really(func, args, kwargs)
        for fake, value in zip(made, tensors_in(real), strict=True):
            if not self._is_known(fake):
                self.know(fake, value)

    def _scalar(self, fake: Tensor) -> Any:
        self.asked += 1
        value = self.of(fake)
        if value is not None:
            with unmetered():
                return value.item()
        if fake.dtype.is_floating_point or fake.dtype.is_complex:
            return 1.0  # a loss, norm or step count, assumed finite and positive
        if fake.dtype is torch.bool:
            return False
        raise PredictionError(
            f"The step asks for an integer at {_asked_at()} that follows from floating-point values, which only "
            "training knows. Compute it from the batch's integers, or leave it out of the step that is predicted."
        )

    def _of_unknown_size(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator whose result's size depends on values; unknown values give the largest size."""
        self.asked += 1
        if func is _aten.index.Tensor:
            indices = [position for index in args[1] for position in self._positions(index)]
            return func(args[0], indices)
        if func is _aten.masked_select.default:
            shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
            with unmetered():
                kept = int(self._or_stand_in(func, args[1]).expand(shape).sum())
            return args[0].new_empty(kept)
        reals = tree_map_only(Tensor, lambda fake: self._or_stand_in(func, fake), (tuple(args), dict(kwargs)))
        with unmetered(), torch.no_grad():
            real = func(*reals[0], **reals[1])
        return tree_map_only(Tensor, self._convert, real)

    def _positions(self, index: Tensor | None) -> list[Tensor | None]:
        """Integer indices instead of a mask."""
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            return [index]
        with unmetered():
            found = self._or_stand_in(_aten.index.Tensor, index).nonzero(as_tuple=True)
        return [self._convert(position) for position in found]

    def _or_stand_in(self, func: Any, fake: Tensor) -> Tensor:
        """Known values, or those that give the largest result: true masks, distinct numbers."""
        known = self.of(fake)
        if known is not None:
            return known
        if func is _aten.repeat_interleave.Tensor:
            raise PredictionError(
                f"The step repeats at {_asked_at()} as often as floating-point values say, which only training knows. "
                "Compute the counts from the batch's integers, or leave it out of the step that is predicted."
            )
        self.assumed.setdefault(_MASKS_KEEP_ALL, _asked_at())
        with unmetered():
            if fake.dtype is torch.bool or func is _aten.nonzero.default:
                return torch.ones(fake.shape, dtype=torch.bool)
            return torch.arange(fake.numel()).reshape(fake.shape).to(fake.dtype)

    def _assume(self, func: Any, args: Any, kwargs: Any, made: Sequence[Tensor]) -> None:
        """Give results of unknown value the value that a healthy step would have."""
        packet = func.overloadpacket
        for place_, fake in enumerate(made):
            if fake.dtype is torch.bool and fake.numel() == 1:
                with unmetered():
                    self.know(fake, torch.full(fake.shape, packet in _TRUE_WHEN_HEALTHY))
            elif fake.dtype.is_floating_point and fake.dim() == 0:
                with unmetered():
                    self.know(fake, torch.ones((), dtype=fake.dtype))  # a loss or norm
            elif _CHOOSES.get(packet) == place_ and fake.dtype is torch.int64 and _may_follow(fake):
                self.assumed.setdefault(_EQUAL_SHARES, _asked_at())
                with unmetered():
                    self.know(fake, _even_choice(fake, *_chosen_from(func, args, kwargs)))


def _asked_at() -> str:
    return describe(place(), "a line of a library")


def _may_follow(fake: Tensor) -> bool:
    numbers = fake.dtype.is_floating_point or fake.dtype.is_complex
    if fake.layout is not torch.strided:
        return False
    return fake.untyped_storage().nbytes() <= (_MOST_BYTES_OF_NUMBERS if numbers else _MOST_BYTES)


def _laid_out_as(fake: Tensor, known: Tensor) -> Tensor:
    whole = torch.empty(0, dtype=fake.dtype)
    return whole.set_(known.untyped_storage(), int(fake.storage_offset()), fake.size(), fake.stride())


def _takes_shape_from_values(func: Any, args: Any) -> bool:
    if func is not _aten.index.Tensor:
        return True
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _chosen_from(func: Any, args: Any, kwargs: Any) -> tuple[int, int]:
    """The number of candidates from which an operator chooses, and their dimension."""
    source = args[0]
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    dim = given.get("dim", -1)
    if dim is None or source.dim() == 0:  # chosen from the flattened tensor
        return source.numel(), 0
    return source.shape[dim], dim


def _even_choice(fake: Tensor, count: int, dim: int) -> Tensor:
    """Indices below `count`, each equally often; those along `dim` differ."""
    if fake.dim() == 0:
        return torch.zeros((), dtype=torch.int64)
    is_gone = fake.dim() <= dim or fake.shape[dim] > count
    if is_gone:  # `dim` was reduced: one choice for each other position
        return (torch.arange(fake.numel()) % count).reshape(fake.shape)
    chosen = fake.shape[dim]
    others = fake.numel() // max(1, chosen)
    rows = (torch.arange(others)[:, None] * chosen + torch.arange(chosen)[None]) % count
    shape = [*fake.shape[:dim], *fake.shape[dim % fake.dim() + 1 :]] if dim >= 0 else list(fake.shape[:-1])
    return rows.reshape(*shape, chosen).movedim(-1, dim)
