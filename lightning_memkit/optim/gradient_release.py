"""Steps each parameter as soon as its gradient is complete: gradients are never all alive; same result.

Autograd calls a hook when a parameter's gradient is complete (`Tensor.register_post_accumulate_grad_hook`).
The user's own optimizer then steps this parameter alone, and its gradient is freed. ``optimizer.step()``
still ends the step. The order in which parameters are stepped does not change the result, unless the
optimizer combines values over the model; optimizers known to do so are refused.
"""

import threading
from collections.abc import Callable
from typing import Any, Literal
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from lightning_memkit.optim.compensation import compensation_of
from lightning_memkit.optim.gradient_hooks import GradientHooks
from lightning_memkit.optim.methods import living, replace_step, stock_step
from lightning_memkit.optim.open_step import OpenStep
from lightning_memkit.optim.pieces import Slot, slots_of_step, with_gradients
from lightning_memkit.optim.release_checks import (
    groups_of,
    refuse_changed_options,
    refuse_gradient,
    refuse_unreleasable,
)
from lightning_memkit.optim.release_norms import refuse_unmeasured, total_of
from lightning_memkit.optim.shadow import ShadowEngine
from lightning_memkit.optim.spent_gradients import SpentGradients, second_gradient_error

BUNDLE_BYTES = 1 << 20
_MARK = "_memkit_release"


class Release:
    """The handle of an optimizer whose gradients are released: clipping, norms, and the undo.

    Made by `release_gradients`.

    Attributes:
        mode: ``"step"`` releases the gradients of the next backward; ``"keep"`` lets them accumulate.
        clip_value: gradients are clipped to ``[-clip_value, clip_value]`` before use; None for no clipping.
        records_norm: whether `last_norm` is recorded, at the cost of reading each gradient once more.
        last_norm: the norm of the last step's gradients, before clipping.
        spent: what was stepped and dropped, and what stands in its place.
    """

    def __init__(self, optimizer: Optimizer, bundle_bytes: int) -> None:
        self.mode: Literal["step", "keep"] = "step"
        self.clip_value: float | None = None
        self.records_norm = False
        self.last_norm: Tensor | None = None
        self.spent = SpentGradients()
        self._optimizer = ref(optimizer)  # weak, since the optimizer owns its release
        self._bundle_bytes = bundle_bytes
        self._compensation = compensation_of(optimizer)
        self._plain = ShadowEngine.plain()
        self._lock = threading.RLock()  # autograd runs one thread for each device
        self._hooks = GradientHooks(self, Release._on_gradient)
        self._measured: dict[Parameter, Tensor] | None = None  # not None while norms are measured
        self._forget_step()
        self._stock_step = stock_step(optimizer)
        self._give_step_back = replace_step(optimizer, lambda *_: self._finish())
        self._load_hook = optimizer.register_load_state_dict_pre_hook(lambda *_: self._abandon())
        self._active = True
        self.attach()

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer whose gradients are released."""
        return living(self._optimizer)

    def __contains__(self, parameter: Parameter) -> bool:
        return parameter in self._hooks

    @property
    def parameters_stepped(self) -> int:
        """How many parameters the current step has stepped so far; 0 between steps."""
        return len(self._slots) - len(self._due) - len(self._waiting)

    def attach(self) -> None:
        """Hook parameters that were added or unfrozen since; every step does so when it ends."""
        if not self._active:  # a scheduler's wrapper keeps our step in use after the undo
            return
        self._hooks.attach(self.optimizer)

    def run_last(self) -> None:
        """Let hooks that were added to parameters since see and change a gradient before it is used."""
        self._hooks.put_last()

    def undo(self) -> None:
        """Restore the optimizer's step; a step under way is dropped, and the parameters already stepped stay so."""
        if not self._active:
            return
        self._active = False
        self.clip_value, self.records_norm = None, False
        self._abandon()
        self._load_hook.remove()
        self._hooks.remove()
        own = getattr(self._optimizer(), "__dict__", {})  # empty if the optimizer was exchanged and is gone
        own.pop(_MARK, None)
        self._give_step_back()

    def measured_norm(self, backward: Callable[[], object]) -> Tensor:
        """The norm of the gradients of a backward, each freed at once; bitwise that of `clip_grad_norm_`.

        Args:
            backward: runs the backward pass, with ``retain_graph=True`` if it has to run a second time.

        Returns:
            A scalar on the gradients' device: the norm of all parameters' norms, in the optimizer's order.
        """
        self._measured = {}
        try:
            self.attach()
            backward()
            return total_of(self._measured, self.optimizer)
        finally:
            self._measured = None
            self.spent.remove()

    def clip_next_step(self, max_norm: float, norm: Tensor) -> None:
        """Scale the next step's gradients as `clip_grad_norm_` would if their norm were ``norm``."""
        self._clip = (max_norm, norm)

    def flush(self) -> None:
        """Step the gradients that still wait for their bucket to fill; ``optimizer.step()`` does so, too."""
        if self._waiting:
            with self._lock, torch.no_grad():
                self._advance(self._waiting)

    def _on_gradient(self, parameter: Parameter) -> None:
        """Autograd's hook: the parameter's gradient is complete. Called for each, so little is done here."""
        gradient = parameter.grad
        if gradient is None:
            return
        if self._measured is not None or self.mode == "keep":
            self._measure(parameter, gradient)
            return
        with self._lock:
            if gradient.is_sparse or gradient.requires_grad:
                refuse_gradient(parameter, gradient)
            if self._open is None:
                self._open_step()
            identity = id(parameter)
            slot = self._due.pop(identity, None)
            if slot is None:
                if identity in self._slots:
                    raise second_gradient_error(parameter.shape)
                return  # the optimizer no longer has it
            self._waiting.append(slot)
            self._waiting_bytes += gradient.nbytes
            if self._waiting_bytes >= self._bundle_bytes:
                with torch.no_grad():
                    self._advance(self._waiting)

    def _measure(self, parameter: Parameter, gradient: Tensor) -> None:
        """Note and free a gradient while norms are measured; otherwise it accumulates."""
        if self._measured is None:
            return
        with self._lock:
            refuse_gradient(parameter, gradient)
            if parameter in self._measured:
                raise second_gradient_error(parameter.shape)
            with torch.no_grad():
                self._measured[parameter] = get_total_norm([gradient])
            self.spent.drop([parameter])

    def _open_step(self) -> OpenStep:
        if self._open is None:
            optimizer = self.optimizer
            engine, stock_step = self._engine_and_step()
            every = slots_of_step(optimizer)
            self._slots = dict(zip([id(slot.parameter) for slot in every], every, strict=True))
            self._due = self._slots.copy()
            self._open = engine.begin(optimizer, stock_step)
            self._options = groups_of(optimizer)
        return self._open

    def _engine_and_step(self) -> tuple[ShadowEngine, Callable[..., Any]]:
        compensation = compensation_of(self.optimizer)
        if compensation is None:
            return self._plain, self._stock_step
        if compensation is not self._compensation:
            raise RuntimeError(
                f"{type(self.optimizer).__name__} was compensated after its gradients were released; call "
                "compensate(optimizer) first, then release_gradients(optimizer)."
            )
        return compensation.engine, compensation.stock_step

    def _advance(self, ready: list[Slot]) -> None:
        """Clip, step and drop the gradients of these parameters."""
        step, parameters = self._open_step(), [slot.parameter for slot in ready]
        if self.records_norm and self.mode == "step":  # in "keep" mode the gradients are a trial's
            for parameter in parameters:
                assert parameter.grad is not None
                self._norms[parameter] = get_total_norm([parameter.grad])
        if self.clip_value is not None:
            clip_grad_value_(parameters, self.clip_value)
        if self._clip is not None:
            clip_grads_with_norm_(parameters, *self._clip)
        step.advance(ready)
        # Kernels and optimizers that write through `.data` leave the version counter as it was; autograd must
        # notice the change where it still needs the old weight.
        torch.autograd.graph.increment_version(parameters)
        if self.mode == "step":
            self.spent.note(parameters)
        self.spent.drop(parameters)
        self._options = groups_of(self.optimizer)
        self._waiting, self._waiting_bytes = [], 0

    def _finish(self) -> None:
        """Step the remaining parameters that have gradients, and end the step."""
        self.spent.remove()
        step, optimizer = self._open_step(), self.optimizer
        if self.parameters_stepped:
            refuse_changed_options(optimizer, self._options)
            self.spent.refuse_changed()
        self.spent.refuse_zeros()
        left = with_gradients(list(self._slots.values()))
        waiting = {slot.index for slot in self._waiting}
        others = [slot.parameter for slot in left if slot.index not in waiting]
        for parameter in others:
            if id(parameter) not in self._due:
                raise second_gradient_error(parameter.shape)
        if self._clip is not None:
            refuse_unmeasured(others)
        if left:
            self._advance(left)
        step.finish()
        if self.records_norm:
            self.last_norm = total_of(self._norms, optimizer) if self._norms else self.last_norm
        self.spent.end_step()
        self._forget_step()
        self.attach()

    def _forget_step(self) -> None:
        self._open: OpenStep | None = None
        # Keyed by id: a tensor's hash is slow, and the slots keep the parameters alive.
        self._slots: dict[int, Slot] = {}
        self._due: dict[int, Slot] = {}  # neither stepped nor waiting to be
        self._waiting: list[Slot] = []
        self._waiting_bytes = 0
        self._norms: dict[Parameter, Tensor] = {}
        self._clip: tuple[float, Tensor] | None = None
        self._options: list[dict[str, Any]] = []

    def _abandon(self) -> None:
        """Drop the step under way: the next one starts from other weights."""
        if self._open is not None and self._optimizer() is not None:
            self._engine_and_step()[0].rounding.end_step()
        self.spent.forget_step()
        self._forget_step()


def release_gradients(optimizer: Optimizer, *, bundle_bytes: int = BUNDLE_BYTES) -> Release:
    """Step each parameter within backward and free its gradient; at most a few gradients are alive at a time.

    ``loss.backward()`` then changes the weights, and ``optimizer.step()`` only ends the step: one backward
    per step. Learning rates must be set before the backward, as a scheduler called after the step does.
    Weights and states are bitwise those of the same optimizer without release (on CUDA under deterministic
    algorithms).

    Args:
        optimizer: any optimizer that steps each parameter by itself; call `compensate` first if you need it.
        bundle_bytes: gradients are kept until they fill a bucket of this many bytes, since stepping many
            small parameters one by one is slow. 0 steps each parameter at once.

    Returns:
        The handle; `Release.undo` restores the optimizer.

    Raises:
        ValueError: gradients are released already, or the optimizer combines them over the model.
        TypeError: the optimizer's step demands a closure, such as LBFGS's.
    """
    if bundle_bytes < 0:
        raise ValueError(f"bundle_bytes={bundle_bytes} must be 0 or more; 0 steps every parameter at once.")
    if release_of(optimizer) is not None:
        raise ValueError(
            f"The gradients of this {type(optimizer).__name__} are released already; call .undo() on the first handle."
        )
    refuse_unreleasable(optimizer)
    release = Release(optimizer, bundle_bytes)
    optimizer.__dict__[_MARK] = release
    return release


def release_of(optimizer: Optimizer) -> Release | None:
    """The handle of an optimizer whose gradients are released; None for any other."""
    return optimizer.__dict__.get(_MARK)
