"""The optimizers of a fit and their compensations: the Trainer's, their successors, and the module's own."""

import os
from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memkit.optim.checkpoints import LOW_HALVES_KEY, as_low, gatherable
from lightning_memkit.optim.compensation import (
    Compensation,
    compensate,
    compensation_of,
    refuse_unsupported,
)
from lightning_memkit.optim.consolidate import NAMES_KEY, parameter_names
from lightning_memkit.optim.late_steps import compensate_first_steps
from lightning_memkit.optim.low_halves import give_low_halves, shared_low_halves
from lightning_memkit.optim.methods import is_known_by_parameter
from lightning_memkit.optim.modes import Mode, States, low_state_of, low_state_of_tensor
from lightning_memkit.optim.pieces import is_compensated, slots
from lightning_memkit.plugins.asked import says
from lightning_memkit.plugins.precision._fit import trainer_of
from lightning_memkit.plugins.strategies._eight_bit import adapt_bitsandbytes_in
from lightning_memkit.utilities.patching import Undo


class FitOptimizers:
    """Compensates every optimizer that steps the module's bfloat16 weights, whoever made it and whenever.

    Args:
        mode: how weights are compensated.
        states: how states are kept.

    Attributes:
        of_trainer: those of the Trainer. Kept here since a compensation does not keep its optimizer alive.
        compensations: theirs, except for Lightning's stand-in for "no optimizer".
        low_halves: of weights that none of them steps: whoever steps one later finds its low half here.
    """

    def __init__(self, mode: Mode, states: States) -> None:
        self.mode: Mode = mode
        self.states: States = states
        self.of_trainer: list[Optimizer] = []
        self.compensations: list[Compensation] = []
        self.low_halves: dict[nn.Parameter, Tensor] = {}
        self._own: WeakSet[Optimizer] = WeakSet()  # the module's own, which the Trainer doesn't know
        self._module: nn.Module | None = None
        self._active = False
        self._counted = 0
        self._waits = False  # whether `low_halves` has those of weights whose states will be offloaded, too

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "compensations": [], "_own": None, "_active": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._own = WeakSet()
        self.compensations = _compensations_of(self.of_trainer)

    @property
    def all(self) -> list[Compensation]:
        """The compensations of all optimizers that still exist."""
        return [*self.compensations, *_compensations_of(self._own)]

    def begin(self, module: nn.Module, optimizers: list[Optimizer]) -> Undo:
        """Compensate the optimizers of a fit, and until the undo any other in its first step."""
        self._module, self._active = module, True
        # After an earlier fit, weights were rewritten.
        for compensation in _compensations_of(self._own):
            give_low_halves(compensation, self.low_halves)
        self._take(optimizers, self.low_halves, waits=self._will_live_on_host())
        for parameter in [parameter for parameter in self.low_halves if not parameter.requires_grad]:
            del self.low_halves[parameter]  # a frozen base is large, and seldom trained later
        self._hold(_compensations_of(self._own))
        release = compensate_first_steps(self._is_ours, self._compensate_own)

        def end() -> None:
            self._active = False
            release()

        return end

    def follow(self) -> bool:
        """Compensate optimizers that took others' place, and parameters that joined; returns whether any did."""
        trainer = trainer_of(self._module) if self._active and self._module is not None else None
        if trainer is None or not trainer.optimizers:
            return False
        now = trainer.optimizers
        same = list(map(id, now)) == list(map(id, self.of_trainer))
        if same and _count(now) == self._counted:
            return False
        for optimizer in now:
            refuse_unsupported(optimizer)
        self._take(now, self.low_halves if same else self._known_low_halves())
        return True

    def state_dict(self) -> dict[str, Any]:
        """The names of the Trainer's optimizers' parameters, their noise, and the low halves of other weights."""
        if self._module is None:
            return {}
        self.follow()
        noise = [compensation.engine.rounding.state_dict() for compensation in self.compensations]
        low = {
            name: gatherable({low_state_of_tensor(half): half})
            for name, parameter in self._module.named_parameters(remove_duplicate=False)
            if (half := self.low_halves.get(parameter)) is not None
        }
        names = parameter_names(self._module, self.of_trainer)
        return {NAMES_KEY: names, "rounding": noise, **({LOW_HALVES_KEY: low} if low else {})}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue the noise; the optimizers' own state dicts have it, too, but sharded training drops it."""
        for compensation, noise in zip(self.compensations, state_dict.get("rounding", ()), strict=False):
            compensation.engine.rounding.load_state_dict(noise)
        saved = state_dict.get(LOW_HALVES_KEY, {})
        if self._module is not None and saved and low_state_of(self.mode) is not None:
            stepped = _stepped(self.of_trainer)
            for name, parameter in self._module.named_parameters(remove_duplicate=False):
                for kind, low in saved.get(name, {}).items() if is_compensated(parameter) else ():
                    self.low_halves[parameter] = as_low(kind, low).to(parameter.device, copy=True)
            for compensation in self.all:
                give_low_halves(compensation, self.low_halves)
            for parameter in stepped & self.low_halves.keys():
                del self.low_halves[parameter]

    def _take(
        self, optimizers: list[Optimizer], low_halves: dict[nn.Parameter, Tensor], *, waits: bool = False
    ) -> None:
        assert self._module is not None
        adapt_bitsandbytes_in(self._module, optimizers)
        self.of_trainer = list(optimizers)
        # An optimizer that may hold copies of its weights gives these their low halves at once.
        waiting = [one for one in optimizers if waits and is_known_by_parameter(one)]
        self.compensations = [
            self._compensated(optimizer, {} if optimizer in waiting else low_halves)
            for optimizer in optimizers
            if any(slots(optimizer))
        ]
        self._counted = _count(optimizers)
        taken = _stepped(optimizers) - _stepped(waiting)
        kept = {parameter: low for parameter, low in low_halves.items() if parameter not in taken}
        self.low_halves.clear()
        self.low_halves.update(kept)
        self._waits = bool(waiting)

    def _compensated(self, optimizer: Optimizer, low_halves: dict[nn.Parameter, Tensor]) -> Compensation:
        existing = compensation_of(optimizer)
        if existing is not None:
            give_low_halves(existing, low_halves)
            return existing
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
        return compensate(optimizer, mode=self.mode, states=self.states, low_halves=low_halves, seed=seed)

    def _will_live_on_host(self) -> bool:
        """Whether a callback offloads states, for which low halves wait: the device may not have room for all."""
        trainer = trainer_of(self._module) if self._module is not None else None
        callbacks = [] if trainer is None else vars(trainer)["callbacks"]
        return any(says(one, "offloads_states") for one in callbacks)

    def give_waiting(self) -> None:
        """Put low halves that have waited into the optimizers' states, wherever these live by now."""
        if self._waits:
            waiting = {
                one: self.low_halves[one] for one in _stepped(self.of_trainer) & self.low_halves.keys()
            }
            for compensation in self.compensations:
                give_low_halves(compensation, waiting)
            for parameter in waiting:
                del self.low_halves[parameter]
            self._waits = False

    def _compensate_own(self, optimizer: Optimizer) -> Compensation:
        """Compensate an optimizer that the Trainer doesn't know."""
        refuse_unsupported(optimizer)
        compensation = self._compensated(optimizer, self._known_low_halves())
        self._own.add(optimizer)
        self._hold([compensation])
        return compensation

    def _hold(self, own: list[Compensation]) -> None:
        """Hold the low halves that only the module's own optimizers have: their successors need them."""
        stepped = _stepped(self.of_trainer)
        held = shared_low_halves(own)
        self.low_halves.update(
            {parameter: low for parameter, low in held.items() if parameter not in stepped}
        )

    def _known_low_halves(self) -> dict[nn.Parameter, Tensor]:
        if low_state_of(self.mode) is None:
            return {}
        self.give_waiting()  # else its weights would be completed by low halves of zero
        return {**self.low_halves, **shared_low_halves(self.all)}

    def _is_ours(self, optimizer: Optimizer) -> bool:
        assert self._module is not None
        own = {id(parameter) for parameter in self._module.parameters()}
        return any(id(slot.parameter) in own for slot in slots(optimizer) if is_compensated(slot.parameter))


def _compensations_of(optimizers: Any) -> list[Compensation]:
    found = [compensation_of(optimizer) for optimizer in optimizers]
    return [compensation for compensation in found if compensation is not None]


def _count(optimizers: list[Optimizer]) -> int:
    return sum(len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups)


def _stepped(optimizers: list[Optimizer]) -> set[nn.Parameter]:
    return {slot.parameter for optimizer in optimizers for slot in slots(optimizer)}
