"""One optimizer step under way: in which order and in which buckets parameters are stepped."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_memkit.optim.blocks import quick_reads
from lightning_memkit.optim.closures import with_closure
from lightning_memkit.optim.comparisons import untried_error
from lightning_memkit.optim.fused.step import fused_step
from lightning_memkit.optim.fused.taking import take
from lightning_memkit.optim.fused.wanted import StepStorage
from lightning_memkit.optim.group_scalars import copied, group_scalars, restore_group_scalars
from lightning_memkit.optim.identity import Float32Forms
from lightning_memkit.optim.own_attributes import has_own_values, own_numbers
from lightning_memkit.optim.piece_shadows import PieceShadows
from lightning_memkit.optim.pieces import Piece, Slot, buckets_of, slots_of_step
from lightning_memkit.optim.shadow_options import ShadowOptions
from lightning_memkit.optim.state_home import home_of


class OpenStep:
    """One optimizer step under way: the state that its buckets share.

    Each parameter may be advanced once, in any order; `finish` ends the step.
    """

    def __init__(self, engine: ShadowOptions, optimizer: Optimizer, stock_step: Callable[..., Any]) -> None:
        self._engine = engine
        self._optimizer = optimizer
        self._stock_step = stock_step
        self._home = home_of(optimizer)
        self._shadows = PieceShadows(engine, optimizer)
        self._scalars = group_scalars(optimizer)
        self._numbers = own_numbers(optimizer) if engine.under_identity else {}
        self._shared = {key: copied(value) for key, value in _of_no_parameter(optimizer)}
        self._advanced: dict[int, dict[str, Any]] = {}  # scalars of the groups that had a parameter to step
        self._begun = False  # whether a stock step has started; it may have failed half-way
        self._stock_steps = 0
        self._fused = False
        self._whole = False  # the stock step has stepped the whole model, under its own identity
        engine.rounding.begin_step()

    def advance(self, ready: Sequence[Slot], *, everything: bool = False) -> None:
        """Step these parameters; each must have its gradient. After a failure, call `take_back` before a retry.

        Args:
            ready: the parameters.
            everything: whether these are all parameters with a gradient, so that no other call follows.
        """
        if self._home is not None:
            self._home.visit(self._optimizer, ready, self._advance)
        elif everything and self._engine.under_identity:
            self._advance_at_once(ready)
        else:
            self._advance(ready)

    def evaluate(self, closure: Callable[[], Any] | None) -> Any:
        """Let the stock step evaluate a closure; all parameters are float32 except during the evaluations."""
        with self.shown_float32(closure) as evaluate:
            return with_closure(self._stock_step, evaluate)()

    @contextmanager
    def shown_float32(self, closure: Callable[[], Any] | None) -> Iterator[Callable[[], Any] | None]:
        """Make all parameters float32 in the context, for a stock step; it gives the closure to take instead."""
        with torch.no_grad():
            forms = Float32Forms(self._engine, self._optimizer, self._trained())
        mode, refusal = self._engine.mode, None
        if self._engine.refuses_own_ways and mode is not None:
            refusal = partial(untried_error, self._optimizer, mode, self._engine.states)
        self._whole = True
        params = [group["params"] for group in self._optimizer.param_groups]
        with _showing(self._optimizer, self._optimizer.state, params), forms.shown():
            yield None if closure is None else forms.evaluating(closure, refusal)

    def _trained(self) -> list[Slot]:
        """The parameters that may get gradients and are stepped in float32."""
        found = []
        every = slots_of_step(self._optimizer)
        _refuse_sparse([slot.parameter for slot in every])
        for slot in every:
            trained = slot.parameter.requires_grad or slot.parameter.grad is not None
            if trained and self._engine.shadows(slot.parameter):
                found.append(slot)
        return found

    def _advance_at_once(self, ready: Sequence[Slot]) -> None:
        """Step the whole model in one bucket, unless `bucket_bytes` is set and `state` holds all values."""
        if self._engine.bucket_bytes is None or has_own_values(self._optimizer):
            self.evaluate(None)
        else:
            self._advance(ready)

    def _advance(self, ready: Sequence[Slot]) -> None:
        plain: list[Slot] = []
        with quick_reads():
            shadowed = self._engine.shadowed(ready)
            if len(shadowed) < len(ready):
                plain = [slot for slot in ready if not self._engine.shadows(slot.parameter)]
        _refuse_sparse([slot.parameter for slot in shadowed])
        shadowed = self._step_fused(shadowed)
        in_8_bits = self._engine.states == "8-bit"
        for bucket in buckets_of(self._optimizer, shadowed, self._engine.bucket_bytes, in_8_bits=in_8_bits):
            if self._engine.under_identity:
                self._step_under_identity([piece.slot for piece in bucket], plain)
            else:
                self._step_bucket(bucket, plain)
            plain = []
        if plain:
            self._step_bucket([], plain)

    def _step_under_identity(self, bucket: list[Slot], plain: list[Slot]) -> None:
        optimizer = self._optimizer
        self._rewind_once_begun()
        seen_params = [self._engine.absent(len(group["params"])) for group in optimizer.param_groups]
        for slot in (*bucket, *plain):
            seen_params[slot.group][slot.place] = slot.parameter
        forms = Float32Forms(self._engine, optimizer, bucket)
        with _showing(optimizer, optimizer.state, seen_params), forms.shown():
            self._stock_step()
        self._note_scalars({slot.group for slot in (*bucket, *plain)})

    def _rewind_once_begun(self) -> None:
        if self._begun:  # values that belong to no parameter advance once a step, not once a bucket
            self._rewind()
        self._begun = True

    def _note_scalars(self, groups: set[int]) -> None:
        self._stock_steps += 1
        scalars = group_scalars(self._optimizer)
        for place in groups:
            self._advanced[place] = scalars[place]

    def take_back(self, failed: Sequence[Slot]) -> None:
        """Forget an `advance` that failed, so that it can be retried; not needed before `finish`.

        Args:
            failed: the parameters of that call. Their weights, gradients and states are restored by the
                caller.
        """
        self._shadows.forget([slot.parameter for slot in failed])
        self._rewind()

    def finish(self) -> None:
        """End the step: scalars that the optimizer keeps in its groups have advanced once."""
        if self._whole:
            self._engine.rounding.end_step()
            return
        if self._stock_steps == 0 and not self._fused:
            self._step_bucket([], [])
        if self._home is not None:
            self._home.settle()
        if self._advanced:
            # The last bucket may have no parameter of a group, which can mislead an optimizer: optimi then
            # selects its Triton step, since "all" parameters of an empty group are on a GPU.
            now = group_scalars(self._optimizer)
            restore_group_scalars(
                self._optimizer, [self._advanced.get(place, scalars) for place, scalars in enumerate(now)]
            )
        self._engine.rounding.end_step()

    def _step_fused(self, shadowed: list[Slot]) -> list[Slot]:
        """Step the parameters that a fused kernel can take; return the others."""
        engine = self._engine
        if not engine.may_fuse or engine.mode is None or engine.states == "exact":
            return shadowed  # exact states promise the optimizer's own arithmetic, bit for bit
        storage = StepStorage(engine.mode, engine.states == "8-bit")
        taken, others = take(self._optimizer, storage, shadowed)
        if taken:
            self._fused = True
            fused_step(taken, engine.mode, engine.rounding)
        return others

    def _step_bucket(self, bucket: list[Piece], plain: list[Slot]) -> None:
        optimizer, full_state = self._optimizer, self._optimizer.state
        self._rewind_once_begun()
        seen_state: defaultdict[Any, Any] = defaultdict(dict)
        seen_state.update(_of_no_parameter(optimizer))
        seen_params = [self._engine.absent(len(group["params"])) for group in optimizer.param_groups]
        for slot in plain:
            seen_params[slot.group][slot.place] = slot.parameter
            if slot.parameter in full_state:
                seen_state[slot.parameter] = full_state[slot.parameter]
        self._shadows.begin_bucket(bucket)
        shadows = [self._shadows.open(piece) for piece in bucket]
        for piece, shadow in zip(bucket, shadows, strict=True):
            seen_params[piece.slot.group][piece.slot.place] = shadow
            seen_state[shadow] = self._shadows.widened(piece)
        with _showing(optimizer, seen_state, seen_params):
            self._stock_step()
        self._note_scalars({piece.slot.group for piece in bucket} | {slot.group for slot in plain})
        for piece, shadow in zip(bucket, shadows, strict=True):
            shadow.grad = None
            self._shadows.close(piece, shadow, seen_state.pop(shadow, {}))
        for slot in plain:
            if slot.parameter in seen_state:
                full_state[slot.parameter] = seen_state.pop(slot.parameter)
        for key in [key for key in seen_state if not isinstance(key, Tensor)]:
            full_state[key] = seen_state[key]

    def _rewind(self) -> None:
        """Restore the values that belong to no parameter, as they were before the step."""
        restore_group_scalars(self._optimizer, self._scalars)
        for name, value in self._numbers.items():
            setattr(self._optimizer, name, value)
        state = self._optimizer.state
        for key, _ in _of_no_parameter(self._optimizer):
            del state[key]
        state.update({key: copied(value) for key, value in self._shared.items()})


def _of_no_parameter(optimizer: Optimizer) -> list[tuple[Any, Any]]:
    """States that an optimizer keeps for all parameters together, under its own keys."""
    return [(key, value) for key, value in optimizer.state.items() if not isinstance(key, Tensor)]


def _refuse_sparse(parameters: Sequence[Parameter]) -> None:
    with quick_reads():
        gradients = [parameter.grad for parameter in parameters]
    sparse = [gradient for gradient in gradients if gradient is not None and gradient.is_sparse]
    if sparse:
        raise RuntimeError(
            f"The gradient of a bfloat16 parameter of shape {tuple(sparse[0].shape)} is sparse: compensated "
            "steps take dense gradients; build the module with sparse=False, or keep it in float32 "
            "(fp32_exceptions=) and give it an optimizer for sparse gradients."
        )


@contextmanager
def _showing(optimizer: Optimizer, state: Any, params: list[list[Parameter]]) -> Iterator[None]:
    """Give the optimizer other states and parameters, and none of its hooks, while it steps."""
    full_state = optimizer.state
    full_params = [group["params"] for group in optimizer.param_groups]
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    optimizer.state = state
    for group, shown in zip(optimizer.param_groups, params, strict=True):
        group["params"] = shown
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = (
        type(hooks[0])(),
        type(hooks[1])(),
    )
    try:
        yield
    finally:
        optimizer.state = full_state
        for group, params_of_group in zip(optimizer.param_groups, full_params, strict=True):
            group["params"] = params_of_group
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = hooks
