"""Makes bfloat16 parameters float32 in place during a step, for optimizers that know them by their identity.

While such an optimizer steps, each parameter object *is* float32, with the same attributes, so that lookups
by parameter or by `id`, closures over parameters, views of groups and lists of buffers find what they would
in float32 training. Price: float32 weights, gradients and widened states of all parameters at once, up to 16
bytes a parameter during the step. C++ references to a parameter (DDP's reducer, autograd) keep the bfloat16
tensor, because the two Python objects exchange their C++ tensors and exchange them back afterwards.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_memkit.optim.blocks import first_element, flat_views
from lightning_memkit.optim.modes import LOW_STATES, low_dtype_of, low_state_of, narrow_, widen_
from lightning_memkit.optim.own_attributes import has_own_values
from lightning_memkit.optim.pieces import Slot
from lightning_memkit.optim.quantised import (
    decoded_states,
    encode_,
    is_quantisable,
    is_quantised_name,
    plain_name,
    room_in,
    row_length,
)
from lightning_memkit.optim.shadow_options import ShadowOptions
from lightning_memkit.optim.state_dtypes import storage_of


def exchange(one: Tensor, other: Tensor) -> None:
    """Exchange the C++ tensors of two objects: values, dtype and gradient, but not their Python attributes."""
    torch._C._swap_tensor_impl(one, other)  # pyright: ignore[reportAttributeAccessIssue]


class _Float32Form:
    """One parameter's float32 tensor for the duration of a step, and the float32 copies of its bfloat16 states."""

    def __init__(self, engine: ShadowOptions, optimizer: Optimizer, slot: Slot) -> None:
        self.slot = slot
        self._engine = engine
        self._optimizer = optimizer
        self._shown = False
        parameter = slot.parameter
        state = optimizer.state[parameter] if parameter in optimizer.state else {}
        if not isinstance(state, dict):
            raise TypeError(
                f"{type(optimizer).__name__} keeps a {type(state).__name__} as the state of a parameter; a "
                "compensated bfloat16 step needs a dict there, to keep its low half in: put it into one, or train in "
                "float32 (precision='32-true')."
            )
        self._low = {name: state[name] for name in LOW_STATES if name in state}
        wide = torch.empty_like(parameter.detach(), dtype=torch.float32)
        widen_(parameter.detach(), next(iter(self._low.values()), None), wide)
        self._other = Parameter(wide, requires_grad=parameter.requires_grad)
        self._other.grad = _float32(parameter.grad)
        self._states = [
            (value, value.float())
            for name, value in state.items()
            if name not in LOW_STATES and name not in engine.bfloat16_states and _is_stored(value, parameter)
        ]
        self._in_8_bits = {name: value for name, value in state.items() if is_quantised_name(name)}

    def show(self) -> None:
        """Make the parameter and its states float32."""
        parameter, state = self.slot.parameter, self._optimizer.state
        if self._low:
            for name in self._low:
                del state[parameter][name]
            if not state[parameter]:  # optimizers create their states only if there are none
                del state[parameter]
        if self._in_8_bits:
            state[parameter] = decoded_states(state[parameter])
        exchange(parameter, self._other)
        for stored, wide in self._states:
            exchange(stored, wide)
        self._shown = True

    def lend(self, *, unmoved: bool = False) -> None:
        """Make the parameter bfloat16 for an evaluation of the model, rounded from the current float32 weight.

        Args:
            unmoved: the optimizer has not changed the weight yet. No bit is written then, since rounding
                might break a tie in another way.
        """
        parameter = self.slot.parameter
        exchange(parameter, self._other)
        self._shown = False
        if not unmoved:
            parameter.detach().copy_(self._other.detach())
        self._hand_gradient_on()

    def resume(self) -> None:
        """Make the parameter float32 again, with the gradient of the evaluation."""
        self._other.grad = _float32(self.slot.parameter.grad)
        exchange(self.slot.parameter, self._other)
        self._shown = True

    def has_moved(self) -> bool:
        """Whether the float32 weight differs from that before the step; valid until the first `lend`."""
        shown, kept = self.slot.parameter.detach(), self._other.detach()
        before = torch.empty_like(shown)
        widen_(kept, next(iter(self._low.values()), None), before)
        return not torch.equal(shown.view(torch.int32), before.view(torch.int32))

    def close(self) -> None:
        """Make the parameter bfloat16 with its low half, and store the states as configured."""
        parameter = self.slot.parameter
        exchange(parameter, self._other)
        self._shown = False
        self._hand_gradient_on()
        state = self._optimizer.state.setdefault(parameter, {})
        self._keep_states(state)
        mode, master = self._engine.mode, self._other.detach()
        assert mode is not None
        name, low = low_state_of(mode), None
        if name is not None:
            before = self._low.get(name)
            low = state[name] = (
                torch.empty_like(master, dtype=low_dtype_of(mode)) if before is None else before
            )
        stream = (self.slot.index, first_element(parameter))
        narrow_(mode, master, parameter.detach(), low, self._engine.rounding, stream)
        if not state:
            del self._optimizer.state[parameter]

    def abandon(self) -> None:
        """Restore identity, state dtypes and low half after an error; restoring values is left to the caller."""
        parameter, state = self.slot.parameter, self._optimizer.state
        if self._shown:
            exchange(parameter, self._other)
        for stored, wide in self._states:
            if stored.dtype == torch.float32:
                exchange(stored, wide)
        if self._in_8_bits:
            of_step = {plain_name(name) for name in self._in_8_bits}
            now = state.get(parameter, {})
            kept = {name: value for name, value in now.items() if name not in of_step}
            state[parameter] = {**kept, **self._in_8_bits}
        if self._low:
            state.setdefault(parameter, {}).update(self._low)

    def _hand_gradient_on(self) -> None:
        """Apply the optimizer's changes of the float32 gradient to the parameter's own gradient."""
        parameter, gradient = self.slot.parameter, self._other.grad
        if gradient is None:
            parameter.grad = None
        elif parameter.grad is None:
            parameter.grad = gradient.to(getattr(parameter, "grad_dtype", None) or parameter.dtype)
        elif parameter.grad.data_ptr() != gradient.data_ptr():
            parameter.grad.copy_(gradient)

    def _keep_states(self, state: dict[str, Any]) -> None:
        """Store moments in bfloat16, within the same tensor objects, or in 8 bits."""
        engine, parameter = self._engine, self.slot.parameter
        rooms = {id(stored): room for stored, room in self._states}
        # What else holds a state would not see its codes.
        in_8_bits = engine.states == "8-bit" and not has_own_values(self._optimizer)
        for name, value in list(state.items()):
            if _is_stored(value, parameter):
                # The optimizer itself chose bfloat16 for a state of float32 weights.
                engine.bfloat16_states.add(name)
                continue
            if in_8_bits and self._encode(state, name):
                continue
            if engine.states == "exact" or not isinstance(value, Tensor) or value._base is not None:
                continue
            group = self._optimizer.param_groups[self.slot.group]
            storage = storage_of(name, value, state, group, self._other)
            if storage == "keep":
                continue
            room = rooms.get(id(value))
            room = torch.empty_like(value, dtype=torch.bfloat16) if room is None else room
            if storage == "stochastic":
                stream = (self.slot.index, name, first_element(parameter))
                engine.rounding.round_(value, room, stream)
            else:
                room.copy_(value)
            exchange(value, room)

    def _encode(self, state: dict[str, Any], name: str) -> bool:
        """Store a state in 8 bits, if the parameter's may have them."""
        parameter, value = self.slot.parameter, state[name]
        length = row_length(parameter) if is_quantisable(name, state) else None
        if length is None or type(value) is not Tensor or value.shape != parameter.shape:
            return False
        flat = flat_views(value, parameter)
        if flat is None or value.dtype != torch.float32:
            return False
        kept = room_in(self._in_8_bits, parameter, name, length)
        codes, scales = kept.values()
        (of_codes,) = flat_views(codes) or (codes,)
        stream = (self.slot.index, name, first_element(parameter))
        encode_(name, flat[0], of_codes, scales, self._engine.rounding.noise(flat[0], stream))
        del state[name]
        state.update(kept)
        return True


class Float32Forms:
    """Parameters that are float32 while an optimizer's own step runs.

    Args:
        engine: its modes and noise apply.
        optimizer: the optimizer of the parameters.
        shown: bfloat16 parameters, none of them sharded.
    """

    def __init__(self, engine: ShadowOptions, optimizer: Optimizer, shown: Iterable[Slot]) -> None:
        with torch.no_grad():
            self._forms = [_Float32Form(engine, optimizer, slot) for slot in shown]

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Make the parameters float32 within the context; afterwards they are bfloat16 with the step's result."""
        try:
            with torch.no_grad():
                for form in self._forms:
                    form.show()
            yield
            with torch.no_grad():
                for form in self._forms:
                    form.close()
        except BaseException:
            for form in self._forms:
                form.abandon()
            raise

    def evaluating(
        self, closure: Callable[[], Any], refusal: Callable[[], Exception] | None = None
    ) -> Callable[[], Any]:
        """Wrap a closure so that it evaluates the model on the current float32 weights rounded to bfloat16.

        Args:
            closure: evaluates the model.
            refusal: makes the error for a step that evaluates a second time or after it has moved weights;
                None if this is allowed.
        """
        evaluations = count()

        def evaluate() -> Any:
            again = next(evaluations) > 0
            if refusal is not None and (again or any(form.has_moved() for form in self._forms)):
                raise refusal()
            with torch.no_grad():
                for form in self._forms:
                    form.lend(unmoved=refusal is not None)
            result = closure()
            with torch.no_grad():
                for form in self._forms:
                    form.resume()
            return result

        return evaluate


def _float32(gradient: Tensor | None) -> Tensor | None:
    if gradient is None:
        return None
    return gradient.detach() if gradient.dtype == torch.float32 else gradient.detach().float()


def _is_stored(value: Any, parameter: Tensor) -> bool:
    """Whether a state may be a float32 state that is stored in bfloat16."""
    alike = type(value) in (Tensor, Parameter) and value.shape == parameter.shape
    return alike and value.dtype == torch.bfloat16
