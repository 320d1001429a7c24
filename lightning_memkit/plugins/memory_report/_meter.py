"""Meter one training batch between Lightning's hooks."""

from collections.abc import Collection
from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_memkit.memory.anatomy import CATEGORIES, Anatomy
from lightning_memkit.memory.findings import Finding
from lightning_memkit.memory.flops import StepFlops
from lightning_memkit.memory.meter import Category, storages_of
from lightning_memkit.memory.origins import Place
from lightning_memkit.memory.step_meter import MeteredStep, StepMeter
from lightning_memkit.micro_batching.proof.optimizer_trial import states_on
from lightning_memkit.optim.modes import LOW_STATES
from lightning_memkit.plugins.memory_report._rates import samples_of, tokens_of
from lightning_memkit.plugins.memory_report._snapshot import record
from lightning_memkit.utilities.tensors import tensors_of


class BatchMeter:
    """Meters one training batch; afterwards it gives the step's anatomy, FLOPs and findings of waste.

    Args:
        trainer: the trainer that runs the batch.
        batch: the batch, where Lightning has put it.
        least_bytes: smaller waste is not reported.
        outer: lines of the stack above the step, which are not the user's code within it.
    """

    def __init__(self, trainer: Trainer, batch: Any, *, least_bytes: int, outer: Collection[Place]) -> None:
        self._trainer = trainer
        self._module = trainer.lightning_module
        self._samples, self._tokens = samples_of(batch), tokens_of(batch)
        self._meter = StepMeter(self._module, least_bytes=least_bytes, outer=outer)
        self._meter.track([*self._module.parameters(), *self._module.buffers()], "weights")
        self._track_states()
        self._meter.track(_gradients(self._module), "gradients")
        self._meter.track(tensors_of(batch), "inputs")
        self._entered = ExitStack()

    def enter(self) -> None:
        """Start metering at the beginning of the batch."""
        # Otherwise torch would mark compiled code that runs under a meter to stay uncompiled for good.
        stance = torch.compiler.set_stance("force_eager")
        self._entered.callback(stance.__exit__, None, None, None)
        self._entered.callback(record(self._trainer.strategy.root_device))
        self._meter.__enter__()
        self._entered.callback(self._meter.__exit__, None, None, None)
        self._meter.phase = "forward"

    def leave(self) -> None:
        """Stop metering after the batch has ended or failed; may be called several times."""
        self._entered.close()

    def end_forward(self) -> None:
        """Mark the end of a micro-batch's forward."""
        self._meter.end_forward()

    def end_backward(self) -> None:
        """Mark the end of a micro-batch's backward; another forward may follow."""
        self._meter.track(_gradients(self._module), "gradients")
        self._meter.phase = "forward"

    def begin_optimizer(self) -> None:
        """Mark the beginning of the optimizer's step."""
        self._meter.phase = "optimizer"

    def step(self, fixed_bytes: int) -> MeteredStep:
        """The metered step."""
        self._track_states()
        return self._meter.step(
            gradients=_gradients(self._module), optimizer_states=(), fixed_bytes=fixed_bytes
        )

    def failed_step(self, fixed_bytes: int) -> MeteredStep:
        """What was alive when the batch ran out of memory; the batch may be retried afterwards."""
        self._track_states()
        found = self._meter.failed_step(
            gradients=_gradients(self._module), optimizer_states=(), fixed_bytes=fixed_bytes
        )
        self._meter.phase = "forward"
        return found

    @property
    def flops(self) -> StepFlops:
        """The FLOPs of the batch."""
        return self._meter.flops.total(samples=self._samples, tokens=self._tokens)

    @property
    def live_bytes(self) -> int:
        """The bytes that are alive now."""
        return self._meter.live_bytes

    def findings(self) -> list[Finding]:
        """The waste that was found; call it after `step`."""
        return self._meter.findings()

    def forget(self) -> None:
        """Release what was recorded; nothing may be read afterwards."""
        self._meter.forget()

    def _track_states(self) -> None:
        for category, states in _states(self._trainer).items():
            self._meter.track(states, category)


def census(trainer: Trainer, batch: Any, fixed_bytes: int) -> MeteredStep:
    """What is alive in a step that is not metered, by owner; the allocator gives the total if it counts."""
    module, device = trainer.lightning_module, trainer.strategy.root_device
    owned = {
        "weights": [*module.parameters(), *module.buffers()],
        "gradients": _gradients(module),
        **_states(trainer),
        "inputs": list(tensors_of(batch)),
    }
    seen: set[int] = set()
    at_peak = dict.fromkeys(CATEGORIES, 0)
    for category, tensors in owned.items():
        for tensor in tensors:
            storages = [one for one in storages_of(tensor) if one.device == device and one._cdata not in seen]
            seen.update(storage._cdata for storage in storages)
            at_peak[category] += sum(storage.nbytes() for storage in storages)
    known = sum(at_peak.values())
    counts: Any = torch.get_device_module(device)
    if device.type != "cpu" and hasattr(counts, "memory_allocated"):
        at_peak["temporaries"] = max(0, counts.memory_allocated(device) - known)
    anatomy = Anatomy(
        peak_bytes=sum(at_peak.values()),
        peak_phase="outside",
        peak_operator="",
        at_peak=at_peak,
        largest=dict(at_peak),
        fixed_bytes=fixed_bytes,
    )
    return MeteredStep(anatomy=anatomy)


def _states(trainer: Trainer) -> dict[Category, list[Tensor]]:
    """The optimizers' states on the device, with compensation separate from the other states."""
    device = trainer.strategy.root_device
    every = [state for optimizer in trainer.optimizers for state in states_on(device, optimizer)]
    low = [
        value
        for optimizer in trainer.optimizers
        for state in optimizer.state.values()
        for name, value in (state.items() if isinstance(state, dict) else ())
        if name in LOW_STATES and isinstance(value, Tensor) and value.device.type == device.type
    ]
    compensating = {id(one) for one in low}
    return {"optimizer_states": [one for one in every if id(one) not in compensating], "compensation": low}


def is_compiled(module: nn.Module) -> bool:
    """Whether any submodule is compiled; in a metered step it runs uncompiled."""
    return any(
        vars(one).get("_compiled_call_impl") is not None or hasattr(one, "_orig_mod")
        for one in module.modules()
    )


def _gradients(module: LightningModule) -> list[Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]
