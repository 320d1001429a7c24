"""The step of any optimizer on float32 shadows of bfloat16 weights, bucket by bucket.

The user's optimizer, its parameters and its group dicts stay what they are. For each bucket the engine builds
float32 shadow parameters, shows the optimizer nothing but them, calls its own step, and writes weights and
states back. The update, weight decay included, therefore happens in float32 on the compensated value.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_memkit.optim.blocks import first_element, local_part
from lightning_memkit.optim.closures import with_closure
from lightning_memkit.optim.comparisons import untried_error
from lightning_memkit.optim.fused.recipes import take
from lightning_memkit.optim.fused.step import fused_step
from lightning_memkit.optim.group_scalars import copied, group_scalars, restore_group_scalars
from lightning_memkit.optim.identity import Float32Forms
from lightning_memkit.optim.methods import uses_closure_its_own_way
from lightning_memkit.optim.modes import LOW_STATES, Mode, States, low_state_of, narrow_, widen_
from lightning_memkit.optim.own_attributes import has_own_values, own_numbers
from lightning_memkit.optim.pieces import Piece, Scratch, Slot, buckets_of, is_compensated, slots
from lightning_memkit.optim.state_dtypes import storage_of
from lightning_memkit.optim.state_home import home_of
from lightning_memkit.optim.stochastic_rounding import StochasticRounding


@dataclass
class _StepProgress:
    """A parameter's state while its pieces are stepped one after the other.

    Attributes:
        before: what the optimizer kept before the step.
        low: the low half before the step, under its name; empty where there is none yet.
        after: what the optimizer keeps after the step, as far as the pieces have come.
        low_after: the low half after the step.
    """

    before: dict[str, Any]
    low: dict[str, Tensor]
    after: dict[str, Any] = field(default_factory=dict)
    low_after: dict[str, Tensor] = field(default_factory=dict)


class ShadowEngine:
    """Steps an optimizer's bfloat16 parameters in float32.

    Args:
        mode: what keeps the bits that bfloat16 lacks; None steps every parameter as it is.
        states: ``"compact"`` keeps moments in bfloat16, ``"exact"`` in float32.
        rounding: the noise of stochastic rounding.
        bucket_bytes: float32 temporaries at a time; None for a size that suits the device.
    """

    def __init__(
        self, mode: Mode | None, states: States, rounding: StochasticRounding, bucket_bytes: int | None
    ) -> None:
        self.mode: Mode | None = mode
        self.states: States = states
        self.rounding = rounding
        self.bucket_bytes = bucket_bytes
        self.under_identity = False  # whether parameters are float32 themselves in a step, not by shadows
        self.bfloat16_states: set[str] = set()  # states that an optimizer keeps in bfloat16 by its own choice
        self.refuses_own_ways = False  # whether a step may evaluate its closure at its start only
        self.may_fuse = True  # whether a kernel may stand in for the step of a class that it knows
        # What the optimizer sees in the place of parameters that are not in the bucket: it has no gradient,
        # so it is passed over, and the places of the others, which some optimizers go by, stay.
        self._absent = Parameter(torch.empty(0))

    @classmethod
    def plain(cls) -> "ShadowEngine":
        """An engine that steps every parameter as it is: the order of a step can be chosen, nothing else."""
        return cls(None, "exact", StochasticRounding(), None)

    def shadows(self, parameter: Tensor) -> bool:
        """Whether a parameter is stepped on a float32 shadow."""
        return self.mode is not None and is_compensated(parameter)

    def step(
        self,
        optimizer: Optimizer,
        stock_step: Callable[..., Any],
        closure: Callable[[], Any] | None = None,
    ) -> Any:
        """One optimizer step, from the gradients as they stand, or as the closure gives them within the step.

        Args:
            optimizer: whose parameters are stepped.
            stock_step: its own step.
            closure: what that is to evaluate.

        Returns:
            What the stock step returns, where it evaluates the model itself.
        """
        own_way = closure is not None and uses_closure_its_own_way(optimizer)
        if own_way and self.under_identity:
            with torch.no_grad():
                step = self.begin(optimizer, stock_step)
            result = step.evaluate(closure)
            with torch.no_grad():
                step.finish()
            return result
        step = self.begin(optimizer, with_closure(stock_step, closure))
        ready = [slot for slot in slots(optimizer) if slot.parameter.grad is not None]
        step.advance(ready, everything=True)
        step.finish()
        return None

    def begin(self, optimizer: Optimizer, stock_step: Callable[..., Any]) -> "OpenStep":
        """Open a step that is advanced parameter by parameter; its result is that of one whole step."""
        return OpenStep(self, optimizer, stock_step)

    def absent(self, count: int) -> list[Parameter]:
        """Placeholders for the parameters of a group."""
        return [self._absent] * count


class OpenStep:
    """One optimizer step in the making: what its buckets share.

    Each parameter may be advanced once, in any order; `finish` ends the step.
    """

    def __init__(self, engine: ShadowEngine, optimizer: Optimizer, stock_step: Callable[..., Any]) -> None:
        self._engine = engine
        self._optimizer = optimizer
        self._stock_step = stock_step
        self._home = home_of(optimizer)
        self._scratch = Scratch()
        self._progress: dict[Parameter, _StepProgress] = {}
        self._scalars = group_scalars(optimizer)
        self._numbers = own_numbers(optimizer) if engine.under_identity else {}
        self._shared = {key: copied(value) for key, value in _of_no_parameter(optimizer)}
        self._advanced: dict[int, dict[str, Any]] = {}  # scalars of the groups that had a parameter to step
        self._begun = False  # whether a stock step was, and may have failed half-way
        self._stock_steps = 0
        self._fused = False
        self._whole = False  # the stock step has seen all of the model, under its own identity
        engine.rounding.begin_step()

    def advance(self, ready: Sequence[Slot], *, everything: bool = False) -> None:
        """Step these parameters now; each must have its gradient. After a failure, `take_back` goes before a retry.

        Args:
            ready: the parameters.
            everything: that is all of them which have one; no other call follows.
        """
        if self._home is not None:
            self._home.visit(self._optimizer, ready, self._advance)
        elif everything and self._engine.under_identity:
            self._advance_at_once(ready)
        else:
            self._advance(ready)

    def evaluate(self, closure: Callable[[], Any] | None) -> Any:
        """Let the stock step evaluate a closure; all parameters are float32 but within the evaluations."""
        with torch.no_grad():
            forms = Float32Forms(self._engine, self._optimizer, self._trained())
        mode, refusal = self._engine.mode, None
        if self._engine.refuses_own_ways and mode is not None:
            refusal = partial(untried_error, self._optimizer, mode, self._engine.states)
        evaluate = None if closure is None else forms.evaluating(closure, refusal)
        self._whole = True
        params = [group["params"] for group in self._optimizer.param_groups]
        with _showing(self._optimizer, self._optimizer.state, params), forms.shown():
            return with_closure(self._stock_step, evaluate)()

    def _trained(self) -> list[Slot]:
        """What may get gradients, and is stepped in float32."""
        found = []
        for slot in slots(self._optimizer):
            _refuse_sparse(slot.parameter)
            trained = slot.parameter.requires_grad or slot.parameter.grad is not None
            if trained and self._engine.shadows(slot.parameter):
                found.append(slot)
        return found

    def _advance_at_once(self, ready: Sequence[Slot]) -> None:
        """The whole model in one bucket, unless the caller has said that parameters go one by one."""
        if self._engine.bucket_bytes is None or has_own_values(self._optimizer):
            self.evaluate(None)
        else:
            self._advance(ready)

    def _advance(self, ready: Sequence[Slot]) -> None:
        shadowed: list[Slot] = []
        plain: list[Slot] = []
        for slot in ready:
            if not self._engine.shadows(slot.parameter):
                plain.append(slot)
                continue
            _refuse_sparse(slot.parameter)
            shadowed.append(slot)
        shadowed = self._step_fused(shadowed)
        for bucket in buckets_of(self._optimizer, shadowed, self._engine.bucket_bytes):
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
        if self._begun:  # what belongs to no parameter advances once a step, not once a bucket
            self._rewind()
        self._begun = True

    def _note_scalars(self, groups: set[int]) -> None:
        self._stock_steps += 1
        scalars = group_scalars(self._optimizer)
        for place in groups:
            self._advanced[place] = scalars[place]

    def take_back(self, failed: Sequence[Slot]) -> None:
        """Forget an `advance` that failed, so that it can be tried again; `finish` needs no such call.

        Args:
            failed: what was to be advanced. Weights, gradients and states are the caller's to put back.
        """
        for slot in failed:
            self._progress.pop(slot.parameter, None)
        self._scratch = Scratch()
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
        # A group without a parameter in the last bucket may draw a wrong conclusion there: optimi then takes
        # its Triton step, since "all" of none are on a GPU.
        now = group_scalars(self._optimizer)
        restore_group_scalars(
            self._optimizer, [self._advanced.get(place, scalars) for place, scalars in enumerate(now)]
        )
        self._engine.rounding.end_step()

    def _step_fused(self, shadowed: list[Slot]) -> list[Slot]:
        """Step those that a fused kernel can take; return the others."""
        engine = self._engine
        if not engine.may_fuse or engine.mode is None or engine.states != "compact":
            return shadowed  # exact states promise the optimizer's own arithmetic, bit for bit
        taken, others = take(self._optimizer, engine.mode, shadowed)
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
        self._scratch.begin_bucket(bucket)
        shadows = [self._open(piece) for piece in bucket]
        for piece, shadow in zip(bucket, shadows, strict=True):
            seen_params[piece.slot.group][piece.slot.place] = shadow
            seen_state[shadow] = self._widened(piece)
        with _showing(optimizer, seen_state, seen_params):
            self._stock_step()
        self._note_scalars({piece.slot.group for piece in bucket} | {slot.group for slot in plain})
        for piece, shadow in zip(bucket, shadows, strict=True):
            shadow.grad = None
            self._close(piece, shadow, seen_state.pop(shadow, {}))
        for slot in plain:
            if slot.parameter in seen_state:
                full_state[slot.parameter] = seen_state.pop(slot.parameter)
        for key in [key for key in seen_state if not isinstance(key, Tensor)]:
            full_state[key] = seen_state[key]

    def _rewind(self) -> None:
        """Put back what belongs to no parameter, as it was before the step."""
        restore_group_scalars(self._optimizer, self._scalars)
        for name, value in self._numbers.items():
            setattr(self._optimizer, name, value)
        state = self._optimizer.state
        for key, _ in _of_no_parameter(self._optimizer):
            del state[key]
        state.update({key: copied(value) for key, value in self._shared.items()})

    def _open(self, piece: Piece) -> Parameter:
        """The float32 shadow of a piece, with its gradient."""
        parameter = piece.slot.parameter
        if parameter not in self._progress:
            state = self._optimizer.state[parameter] if parameter in self._optimizer.state else {}
            self._progress[parameter] = _StepProgress(
                before={name: value for name, value in state.items() if name not in LOW_STATES},
                low={name: state[name] for name in LOW_STATES if name in state},
            )
        low = next(iter(self._progress[parameter].low.values()), None)
        weight = self._scratch.like(piece.view(parameter))
        widen_(
            local_part(piece.view(parameter)),
            None if low is None else local_part(piece.view(low)),
            local_part(weight),
        )
        shadow = Parameter(weight)
        vars(shadow).update(vars(parameter))  # rates and the like that users give parameters
        assert parameter.grad is not None
        shadow.grad = self._float32(piece.view(parameter.grad))
        return shadow

    def _widened(self, piece: Piece) -> dict[str, Any]:
        """What the stock step sees as the state of a piece: bfloat16 moments in float32, no low half."""
        seen: dict[str, Any] = {}
        group = self._optimizer.param_groups[piece.slot.group]
        for name, value in self._progress[piece.slot.parameter].before.items():
            if (
                name == "step"
                and isinstance(value, Tensor)
                and (group.get("fused") or group.get("capturable"))
            ):
                value = value.to(piece.slot.parameter.device)  # fused steps keep the count on the host
            if isinstance(value, Tensor) and value.shape == piece.slot.parameter.shape:
                part = piece.view(value)
                seen[name] = self._float32(part) if value.dtype == torch.bfloat16 else part
            elif isinstance(value, Tensor) and value.dtype == torch.bfloat16:
                seen[name] = value.float()  # a factored moment, from a checkpoint of uncompensated training
            else:  # counters advance once a step: each piece but the last gets a copy of its own
                seen[name] = value if piece.whole else copied(value)
        return seen

    def _float32(self, part: Tensor) -> Tensor:
        if part.dtype == torch.float32:
            return part.detach()
        wide = self._scratch.like(part)
        local_part(wide).copy_(local_part(part))
        return wide

    def _close(self, piece: Piece, shadow: Parameter, stepped: dict[str, Any]) -> None:
        """Write a stepped piece back into parameter, state and low half."""
        parameter = piece.slot.parameter
        progress = self._progress[parameter]
        for name, value in stepped.items():
            self._store(name, value, stepped, piece, shadow)
        self._narrow(piece, local_part(shadow), progress)
        if piece.last:
            state = self._optimizer.state[parameter]
            state.clear()
            state.update(progress.after)
            state.update(progress.low_after)
            del self._progress[parameter]

    def _store(
        self, name: str, value: Any, stepped: Mapping[str, Any], piece: Piece, shadow: Parameter
    ) -> None:
        parameter, progress = piece.slot.parameter, self._progress[piece.slot.parameter]
        if not isinstance(value, Tensor) or value.shape != shadow.shape:
            progress.after[name] = value
            return
        group = self._optimizer.param_groups[piece.slot.group]
        compact = self._engine.states == "compact"
        storage = storage_of(name, value, stepped, group, shadow) if compact else "keep"
        if storage == "keep" and piece.whole and not self._scratch.owns(value):
            progress.after[name] = value
            return
        dtype = value.dtype if storage == "keep" else torch.bfloat16
        if name not in progress.after:
            progress.after[name] = _reuse(progress.before.get(name), parameter, dtype)
        source, target = local_part(value), local_part(piece.view(progress.after[name]))
        if storage == "stochastic":
            start = first_element(parameter) + piece.start
            self._engine.rounding.round_(source, target, (piece.slot.index, name, start))
        elif source.data_ptr() != target.data_ptr() or source.dtype != target.dtype:
            target.copy_(source)

    def _narrow(self, piece: Piece, master: Tensor, progress: _StepProgress) -> None:
        """Write the float32 master into the weight and what is left over into the low half."""
        mode, parameter = self._engine.mode, piece.slot.parameter.detach()
        assert mode is not None
        name, low = low_state_of(mode), None
        if name is not None:
            if name not in progress.low_after:
                dtype = torch.int16 if mode == "split" else torch.bfloat16
                progress.low_after[name] = _reuse(progress.low.get(name), parameter, dtype)
            low = local_part(piece.view(progress.low_after[name]))
        high, stream = (
            local_part(piece.view(parameter)),
            (piece.slot.index, first_element(piece.slot.parameter) + piece.start),
        )
        narrow_(mode, master, high, low, self._engine.rounding, stream)


def _of_no_parameter(optimizer: Optimizer) -> list[tuple[Any, Any]]:
    """States that an optimizer keeps for all parameters together, under keys of its own."""
    return [(key, value) for key, value in optimizer.state.items() if not isinstance(key, Tensor)]


def _refuse_sparse(parameter: Parameter) -> None:
    if parameter.grad is not None and parameter.grad.is_sparse:
        raise RuntimeError(
            f"The gradient of a bfloat16 parameter of shape {tuple(parameter.shape)} is sparse: compensated "
            "steps take dense gradients; build the module with sparse=False, or keep it in float32 "
            "(fp32_exceptions=) and give it an optimizer for sparse gradients."
        )


def _reuse(previous: Any, like: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor to write to: the one of the last step where it fits."""
    if isinstance(previous, Tensor) and previous.dtype == dtype and previous.shape == like.shape:
        return previous
    return torch.empty_like(like, dtype=dtype)


@contextmanager
def _showing(optimizer: Optimizer, state: Any, params: list[list[Parameter]]) -> Iterator[None]:
    """Let the optimizer see other states, parameters and no hooks of its own while it steps."""
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
