"""Steps a large parameter slice by slice: the same bits, with copies and temporaries of a slice's size.

Works only for optimizers that treat every element by itself. They see a slice as a parameter of its own, over
the same memory; counters get copies, so that they advance once a step.
"""

from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_memkit.optim import pieces
from lightning_memkit.optim.blocks import FIRST_ELEMENT
from lightning_memkit.optim.group_scalars import copied
from lightning_memkit.optim.pieces import Slot
from lightning_memkit.optim.quantised import row_length
from lightning_memkit.optim.shadow import ShadowEngine

# Classes of other packages; `pieces._ELEMENTWISE` has torch's. Only exact classes count, because a subclass
# may have another step.
_ELEMENTWISE_ELSEWHERE = {
    "lion_pytorch.lion_pytorch": ("Lion",),
    "optimi.adam": ("Adam",),
    "optimi.adamw": ("AdamW",),
    "optimi.adan": ("Adan",),
    "optimi.lion": ("Lion",),
    "optimi.radam": ("RAdam",),
    "optimi.ranger": ("Ranger",),
    "optimi.sgd": ("SGD",),
    "schedulefree.adamw_schedulefree": ("AdamWScheduleFree",),
    "schedulefree.radam_schedulefree": ("RAdamScheduleFree",),
    "schedulefree.sgd_schedulefree": ("SGDScheduleFree",),
}
_PLAIN_TENSORS = (Tensor, Parameter)
_SLICE_BYTES_CPU = (
    4 << 20
)  # stays in the cache with its copies and temporaries; smaller slices cost more calls
# ATen's CPU loops process vectors of elements and the remainder one by one, which may round differently in 16
# bits (vectorized_loop in aten/src/ATen/native/cpu/Loops.h, GRAIN_SIZE in ATen/TensorIterator.h).
_VECTOR_ELEMENTS = 64  # two 512-bit vectors of the smallest dtype
_ELEMENTS_OF_A_THREAD = 32768


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether the class's step is known to treat each element of a parameter by itself."""
    kind = type(optimizer)
    known_elsewhere = _ELEMENTWISE_ELSEWHERE.get(kind.__module__, ())
    return kind in pieces._ELEMENTWISE or kind.__qualname__ in known_elsewhere


def is_sliceable(optimizer: Optimizer, slot: Slot, engine: ShadowEngine) -> bool:
    """Whether an elementwise optimizer's parameter can be stepped in slices: dense, real, contiguous, on one rank.

    Args:
        optimizer: an elementwise one.
        slot: the parameter; it has its gradient.
        engine: the engine that steps it.
    """
    group, parameter = optimizer.param_groups[slot.group], slot.parameter
    if group.get("capturable") or group.get("differentiable"):
        return False
    if engine.shadows(parameter) and _draws_noise(engine) and parameter.device.type != "cpu":
        return False  # off the CPU, noise depends on the size of a `Piece`
    if engine.states == "8-bit" and engine.shadows(parameter) and row_length(parameter) is not None:
        return False  # a slice has no rows, to which scales belong
    state = optimizer.state[parameter] if parameter in optimizer.state else {}
    values = [value for value in state.values() if isinstance(value, Tensor)]
    nested = any(isinstance(value, (dict, list, tuple)) for value in state.values())
    alike = [parameter, parameter.grad, *(value for value in values if value.dim() > 0)]
    return not nested and all(tensor is not None and _fits(tensor, parameter) for tensor in alike)


def _fits(tensor: Tensor, parameter: Parameter) -> bool:
    return (
        type(tensor) in _PLAIN_TENSORS
        and tensor.layout == torch.strided
        and tensor.shape == parameter.shape
        and tensor.is_contiguous()
        and not tensor.is_complex()
    )


def _draws_noise(engine: ShadowEngine) -> bool:
    return engine.states != "exact" or engine.mode in ("kahan", "split24", "stochastic")


class SlicedParameter:
    """A parameter under way through one step, slice by slice; each slice is shown, stepped, kept and hidden.

    Args:
        optimizer: the optimizer of the parameter.
        slot: a parameter that `is_sliceable`.
        engine: the engine that steps it.

    Attributes:
        slot: the parameter.
        start: the first element that has not been stepped.
    """

    def __init__(self, optimizer: Optimizer, slot: Slot, engine: ShadowEngine) -> None:
        parameter, state = slot.parameter, optimizer.state
        assert parameter.grad is not None
        self.slot = slot
        self.start = 0
        self._state = state
        self._weight = _flat(parameter)
        self._gradient = _flat(parameter.grad)
        self._before = state[parameter] if parameter in state else None
        self._moments = {
            name: _flat(value)
            for name, value in (self._before or {}).items()
            if isinstance(value, Tensor) and value.shape == parameter.shape
        }
        self._made: dict[str, Tensor] = {}  # states that this step creates, or creates in another dtype
        self._shown: Parameter | None = None
        self._element_bytes = sum(
            tensor.element_size() for tensor in (self._weight, self._gradient, *self._moments.values())
        )
        on_cpu = parameter.device.type == "cpu"
        self._most_bytes = _SLICE_BYTES_CPU if on_cpu else None
        self._runs = _Runs(
            parameter.numel(),
            # The engine slices its shadows, too.
            at_once=pieces.piece_elements(parameter.device) if engine.shadows(parameter) else None,
            # Fused kernels give threads whole vectors; off the CPU every element is computed alone.
            by_threads=on_cpu and not optimizer.param_groups[slot.group].get("fused"),
        )

    @property
    def done(self) -> bool:
        """Whether all slices have been stepped."""
        return self.start == self._weight.numel()

    def show(self, most_bytes: int) -> Slot:
        """Give the optimizer a slice from `start` as a parameter, with its gradient and states.

        Args:
            most_bytes: the most bytes that slice, gradient and states take together.
        """
        slot, most = self.slot, min(most_bytes, self._most_bytes or most_bytes) // self._element_bytes
        stop = self._runs.stop_of_slice(self.start, most)
        part = self._shown = Parameter(self._weight[self.start : stop], slot.parameter.requires_grad)
        if self._gradient.dtype != part.dtype:
            part.grad_dtype = self._gradient.dtype
        setattr(part, FIRST_ELEMENT, self.start)
        part.grad = self._gradient[self.start : stop]
        if self._before is not None:
            self._state[part] = {
                name: self._moments[name][self.start : stop] if name in self._moments else copied(value)
                for name, value in self._before.items()
            }
        return Slot(slot.group, slot.place, slot.index, part)

    def hide(self) -> None:
        """Remove the slice from the optimizer."""
        if self._shown is not None:
            self._state.pop(self._shown, None)
            self._shown = None

    def keep(self) -> None:
        """Store the result of the shown slice's step, and go on behind it; may allocate memory for states."""
        part = self._shown
        assert part is not None
        stop = self.start + part.numel()
        if part in self._state:
            stepped = self._state[part]
            moments = {
                name: self._whole(name, value)
                for name, value in stepped.items()
                if isinstance(value, Tensor) and value.shape == part.shape
            }
            for name, whole in moments.items():
                target = _flat(whole)[self.start : stop]
                if stepped[name].data_ptr() != target.data_ptr():
                    target.copy_(stepped[name])
            if stop == self._weight.numel():
                self._finish(moments, stepped)
        self.start = stop

    def _whole(self, name: str, value: Tensor) -> Tensor:
        """The whole state to which a slice's state belongs."""
        before = None if self._before is None else self._before.get(name)
        if name in self._moments and before is not None and before.dtype == value.dtype:
            return before
        if name not in self._made:
            self._made[name] = torch.empty_like(self.slot.parameter, dtype=value.dtype, requires_grad=False)
        return self._made[name]

    def _finish(self, moments: dict[str, Tensor], stepped: dict[str, Any]) -> None:
        """Store the states of the whole parameter; counters are the last slice's."""
        state = self._state[self.slot.parameter]
        after = {
            name: moments[name] if name in moments else _in_place(state.get(name), value)
            for name, value in stepped.items()
        }
        state.clear()
        state.update(after)


class _Runs:
    """Where slices may end: at vector boundaries, or where a loop of the unsliced step ends.

    Args:
        count: the parameter's elements.
        at_once: how many elements an unsliced step takes at a time; None for all.
        by_threads: whether threads divide elements without regard to vectors.
    """

    def __init__(self, count: int, at_once: int | None, by_threads: bool) -> None:
        self._count = count
        self._at_once = min(count, at_once or count)
        self._by_threads = by_threads

    def stop_of_slice(self, start: int, most: int) -> int:
        """The end of a slice of at most this many elements, but at least one vector."""
        most = max(most // _VECTOR_ELEMENTS * _VECTOR_ELEMENTS, _VECTOR_ELEMENTS)
        count = min(most, self._stop_of_run(start) - start)
        while self._by_threads and not _is_even(count):
            count -= count % (_VECTOR_ELEMENTS * _threads_for(count))
        return start + count

    def _stop_of_run(self, start: int) -> int:
        first = start // self._at_once * self._at_once
        count = min(self._at_once, self._count - first)
        if self._by_threads and not _is_even(count):
            share = ceil(count / _threads_for(count))
            count = min(count, ((start - first) // share + 1) * share)
        return first + count


def _is_even(count: int) -> bool:
    """Whether no thread but the last one ends within a vector."""
    threads = _threads_for(count)
    return threads == 1 or ceil(count / threads) % _VECTOR_ELEMENTS == 0


def _threads_for(count: int) -> int:
    return min(torch.get_num_threads(), ceil(count / _ELEMENTS_OF_A_THREAD))


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1)


def _in_place(before: Any, value: Any) -> Any:
    """A counter's new value, written into its old tensor if it fits."""
    if isinstance(before, Tensor) and isinstance(value, Tensor):
        if (before.shape, before.dtype, before.device) == (value.shape, value.dtype, value.device):
            return before.copy_(value)
    return value
