"""Train bfloat16 weights with any optimizer and lose no update: 2 bytes a parameter more than plain bfloat16.

`compensate(optimizer)` changes how the given optimizer steps and saves, and nothing else.
"""

import warnings
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_memkit.optim.bytes_per_parameter import BytesPerParameter, bytes_per_parameter
from lightning_memkit.optim.closures import with_closure
from lightning_memkit.optim.comparisons import refuse_comparisons
from lightning_memkit.optim.consolidate import float32_weight
from lightning_memkit.optim.eager import restore_filled_states, warn_of_own_values, widen_own_buffers
from lightning_memkit.optim.eight_bit import adapt_bitsandbytes, is_bitsandbytes
from lightning_memkit.optim.low_forms import put_low_halves
from lightning_memkit.optim.methods import (
    COMPENSATION,
    has_own_step,
    is_known_by_parameter,
    living,
    local_optimizer,
    refuse_differentiable,
    replace_step,
    stock_step,
    uses_closure_its_own_way,
)
from lightning_memkit.optim.modes import (
    LOW_STATES,
    Mode,
    States,
    check_options,
)
from lightning_memkit.optim.pieces import is_compensated, slots
from lightning_memkit.optim.quantised import decoded_states
from lightning_memkit.optim.schedule_free import switch_in_float32
from lightning_memkit.optim.shadow import ShadowEngine
from lightning_memkit.optim.snapshots import OptimizerSnapshot, restore_snapshot, take_snapshot
from lightning_memkit.optim.stochastic_rounding import StochasticRounding
from lightning_memkit.optim.wrapper_checkpoints import keep_states_exact
from lightning_memkit.utilities.errors import NoEffectWarning


class Compensation:
    """The handle of a compensated optimizer: undo, exact roll-back, byte counts and float32 weights.

    Made by `compensate`. The optimizer's own `step`, `zero_grad`, `state_dict` and `load_state_dict` are used
    as before; ``step(closure)`` evaluates the closure as the optimizer does.
    """

    def __init__(self, optimizer: Optimizer, engine: ShadowEngine) -> None:
        # The optimizer owns its compensation. A strong reference back would make a cycle and keep its states
        # in memory until the garbage collector runs.
        self._optimizer = ref(optimizer)
        assert engine.mode is not None
        self.mode: Mode = engine.mode
        self.states: States = engine.states
        self.engine = engine
        self.undo_widening: Callable[[], None] = lambda: None
        self._active = True
        self.stock_step = stock_step(optimizer)
        engine.may_fuse = not has_own_step(optimizer)
        engine.under_identity = not (is_known_by_parameter(optimizer) or _is_sharded(optimizer))
        self._undo_checkpoints = keep_states_exact(optimizer, engine.rounding)
        self._undo_switches = switch_in_float32(optimizer)
        self._give_step_back = replace_step(optimizer, self._act)
        # Copying or pickling the class's usual way would give plain bfloat16 steps, which lose small updates.
        optimizer.__dict__["__reduce_ex__"] = self._reduced

    @property
    def optimizer(self) -> Optimizer:
        """The compensated optimizer."""
        return living(self._optimizer)

    def undo(self) -> None:
        """Restore the optimizer's own step and drop the low halves; states are cast to the weights' dtype."""
        optimizer = self._optimizer() if self._active else None
        if optimizer is None:  # undone already, or exchanged for another one and gone
            return
        self._active = False
        self._undo_checkpoints()
        self._undo_switches()
        self.undo_widening()
        self._give_step_back()
        optimizer.__dict__.pop(COMPENSATION, None)
        optimizer.__dict__.pop("__reduce_ex__", None)
        for slot in slots(optimizer):
            state = optimizer.state.get(slot.parameter)
            if state is None or not is_compensated(slot.parameter):
                continue
            for name in LOW_STATES:
                state.pop(name, None)
            plain = decoded_states(state)
            state.clear()
            state.update(plain)
            group, count = optimizer.param_groups[slot.group], state.get("step")
            if isinstance(count, Tensor) and (group.get("fused") or group.get("capturable")):
                # Where torch's fused and capturable steps expect it.
                state["step"] = count.to(slot.parameter.device)
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dtype == torch.float32 and value.dim() > 0:
                    state[name] = value.to(slot.parameter.dtype)
            if not state:
                del optimizer.state[slot.parameter]

    def snapshot(self, *, weights: bool = True, device: torch.device | None = None) -> OptimizerSnapshot:
        """Copy everything that a trial step changes: weights, states, low halves, group scalars, rounding noise.

        Gradients and torch's own random state are left to the caller.

        Args:
            weights: False leaves the weights to the caller.
            device: where the copies live; each tensor's own device by default.
        """
        taken = take_snapshot(self.optimizer, weights=weights, device=device)
        taken.extra["rounding"] = self.engine.rounding.state_dict()
        return taken

    def restore(self, snapshot: OptimizerSnapshot, *, keep_new: bool = False) -> None:
        """Restore a snapshot bit for bit; it can be restored again later.

        Args:
            snapshot: one of this optimizer.
            keep_new: as for `restore_snapshot`.
        """
        restore_snapshot(self.optimizer, snapshot, keep_new=keep_new)
        self.engine.rounding.load_state_dict(snapshot.extra["rounding"])

    def bytes_per_parameter(self) -> BytesPerParameter:
        """Measure the optimizer's tensors as they are now; compact states exist only after the first step."""
        return bytes_per_parameter(self.optimizer)

    def float32_weights(self) -> Iterator[tuple[Parameter, Tensor]]:
        """Yield each parameter with the float32 value that is trained, one new tensor (4 bytes a value) at a time."""
        for slot in slots(self.optimizer):
            yield (
                slot.parameter,
                float32_weight(slot.parameter, self.optimizer.state.get(slot.parameter, {})),
            )

    def _reduced(self, protocol: Any) -> tuple[Any, ...]:
        """What copy and pickle rebuild the optimizer from."""
        optimizer, engine = self.optimizer, self.engine
        options = (self.mode, self.states, engine.bucket_bytes, engine.rounding.state_dict())
        return _compensated_again, (type(optimizer), optimizer.__getstate__(), options)

    def _act(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        if self._active:
            return self.engine.step(optimizer, self.stock_step, closure)
        # Undone, but a scheduler made since has wrapped our step.
        return with_closure(self.stock_step, closure)()


def compensate(
    optimizer: Optimizer,
    *,
    mode: Mode = "kahan",
    states: States = "compact",
    low_halves: MutableMapping[Parameter, Tensor] | None = None,
    seed: int = 0,
    bucket_bytes: int | None = None,
) -> Compensation:
    """Make an optimizer over bfloat16 weights step in float32; 2 bytes a parameter more for kahan and split.

    Weights, gradients and AdamW's moments then take 10 bytes a parameter with ``states="compact"``, 14 with
    ``"exact"``, about 8 with ``"8-bit"``, and one less with ``mode="split24"``. Other dtypes are stepped as they are.

    Args:
        optimizer: any optimizer that steps each parameter by itself; of a `ZeroRedundancyOptimizer` the inner
            optimizer, which has this rank's shard, is compensated. An optimizer that combines values over the
            whole model is given all of it at once, at 16 bytes a parameter, if its groups reveal it (Prodigy,
            D-Adaptation, ``max_grad_norm``); for any other such optimizer set ``bucket_bytes`` large enough.
        mode: ``"split"`` keeps the exact float32 weight, ``"kahan"`` about 16 bits of it,
            ``"split24"`` its first 24 bits, the last of them rounded at random, ``"stochastic"`` rounds to
            bfloat16 at random for 0 bytes, ``"none"`` rounds to nearest and loses small updates.
        states: ``"compact"`` keeps moments in bfloat16, second moments stochastically rounded; ``"8-bit"`` keeps
            means of gradients and their squares in 8 bits where rows have 32 values or more (`optim.quantised`), and
            others as ``"compact"``; ``"exact"`` keeps every state in float32.
        low_halves: int16 low halves of float32 weights, as `cast_module` collects them, whose place is taken
            by what they become in the mode's form; or those of another optimizer over the same parameters
            (`shared_low_halves`), which then are shared.
        seed: seeds stochastic rounding, which leaves torch's random state alone.
        bucket_bytes: float32 temporaries of a step, by default 8 MiB on a CPU and 256 MiB elsewhere. Optimizers
            that are known to treat every element alike (AdamW and most of torch.optim) step larger parameters
            in slices of the default size, even if ``bucket_bytes`` is less; for any other, a parameter that
            exceeds it is a bucket of its own.

    Returns:
        The handle; `Compensation.undo` restores the optimizer.

    Raises:
        ValueError: an unknown mode or states; an optimizer that is already compensated, has
            `differentiable=True`, or compares evaluations of its closure (LBFGS, line searches) while weights
            or states are rounded.
        TypeError: an optimizer whose step evaluates its closure in a way of its own, over sharded parameters.
    """
    check_options(mode, states)
    refuse_unsupported(optimizer)
    # ZeRO-1's step does not touch weights: it lets the inner optimizer step, whose groups and states are this
    # rank's shard. Float32 shadows given to the outer optimizer would never be stepped, and writing them back
    # would undo the step.
    optimizer = local_optimizer(optimizer)
    if compensation_of(optimizer) is not None:
        raise ValueError(
            f"This {type(optimizer).__name__} is compensated already: one compensation an optimizer; "
            "call .undo() on the first one to change its options."
        )
    if not any(is_compensated(slot.parameter) for slot in slots(optimizer)):
        dtypes = sorted({str(slot.parameter.dtype) for slot in slots(optimizer)})
        warnings.warn(
            f"{type(optimizer).__name__} has no bfloat16 parameter (it has {', '.join(dtypes) or 'none'}), so "
            "there is nothing to compensate; cast the module first, with lightning_memkit.initialization.cast_module.",
            NoEffectWarning,
            stacklevel=2,
        )
    untried = refuse_comparisons(optimizer, mode, states)
    known = is_known_by_parameter(optimizer)
    engine = ShadowEngine(mode, states, StochasticRounding(seed), bucket_bytes)
    engine.refuses_own_ways = untried
    compensation = Compensation(optimizer, engine)
    if engine.under_identity:
        compensation.undo_widening = widen_own_buffers(optimizer, low_halves or {})
    else:
        restore_filled_states(optimizer)
        if not known:
            warn_of_own_values(optimizer)
    optimizer.__dict__[COMPENSATION] = compensation
    put_low_halves(optimizer, engine, {} if low_halves is None else low_halves)
    _mend_loading(optimizer)
    return compensation


def _compensated_again(kind: type[Optimizer], state: Any, options: tuple[Any, ...]) -> Optimizer:
    """A copied optimizer, compensated like the original."""
    optimizer = kind.__new__(kind)
    optimizer.__setstate__(state)
    mode, states, bucket_bytes, rounding = options
    compensation = compensate(optimizer, mode=mode, states=states, bucket_bytes=bucket_bytes)
    compensation.engine.rounding.load_state_dict(rounding)
    return optimizer


def _mend_loading(optimizer: Optimizer) -> None:
    """Keep the `load_state_dict` of bitsandbytes from casting low halves."""
    if is_bitsandbytes(optimizer):
        adapt_bitsandbytes(optimizer)


def compensation_of(optimizer: Optimizer) -> Compensation | None:
    """The handle of a compensated optimizer, or of the inner one of ZeRO-1; None for any other."""
    return local_optimizer(optimizer).__dict__.get(COMPENSATION)


def refuse_unsupported(optimizer: Optimizer) -> None:
    """Refuse optimizers that can't step bucket by bucket from given gradients.

    Raises:
        TypeError: it is no `Optimizer`, steps inside DDP's backward, or evaluates its closure in a way of its
            own over sharded parameters.
        ValueError: a group asks for a differentiable step.
    """
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"{name} wraps an optimizer and writes weights outside of its step, in their own dtype; give the "
            "optimizer itself (of ScheduleFree a class such as AdamWScheduleFree), or train in float32 "
            "(precision='32-true')."
        )
    if getattr(optimizer, "_overlap_with_ddp", False):
        raise TypeError(
            f"{name}(overlap_with_ddp=True) steps inside DDP's backward, by functions instead of an optimizer, which "
            "a compensated bfloat16 step can't do; leave it False."
        )
    refuse_differentiable(local_optimizer(optimizer), "a compensated bfloat16 step")
    if uses_closure_its_own_way(optimizer) and _is_sharded(optimizer):
        raise TypeError(
            f"{name}.step evaluates its closure in a way of its own (SAM, LBFGS), and its parameters are sharded "
            "(DTensor): a compensated bfloat16 step can't show the model weights that are in the middle of a step "
            "there. Use an optimizer such as AdamW, or train in float32 (precision='32-true')."
        )


def _is_sharded(optimizer: Optimizer) -> bool:
    return any(hasattr(slot.parameter, "to_local") for slot in slots(optimizer))
