"""A training on a device through Lightning's own loop: the time of its last steps, and its peaks."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks._gpu_device import emptied, synchronize

LAST = 6  # steps of which the median is taken


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """What a training took.

    Args:
        step_seconds: the median of the last steps.
        allocated_bytes: the most that the allocator handed out from the first step on; 0 where nothing counts it.
        reserved_bytes: the most that it reserved.
        resident_bytes: what it had handed out at the end of the last step.
    """

    step_seconds: float
    allocated_bytes: int
    reserved_bytes: int
    resident_bytes: int


class StepClock(Callback):
    """Waits for the device after each step, and reads the clock and the allocator."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._resident_bytes = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Peaks count from the first step on, without what building the model has left in the cache."""
        if trainer.strategy.root_device.type == "cuda":
            emptied(trainer.strategy.root_device)
            torch.cuda.reset_peak_memory_stats()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        """The end of a step."""
        device = trainer.strategy.root_device
        synchronize(device)
        self._times.append(time.perf_counter())
        if device.type == "cuda":
            self._resident_bytes = torch.cuda.memory_allocated()

    def fitted(self) -> Fitted:
        """What was seen, at the end."""
        on_card = torch.cuda.is_initialized()
        return Fitted(
            step_seconds=last_seconds(self._times),
            allocated_bytes=torch.cuda.max_memory_allocated() if on_card else 0,
            reserved_bytes=torch.cuda.max_memory_reserved() if on_card else 0,
            resident_bytes=self._resident_bytes,
        )


class Repeated:
    """A loader that gives the same batch so many times."""

    def __init__(self, batch: Any, times: int) -> None:
        self._batch, self._times = batch, times

    def __len__(self) -> int:
        return self._times

    def __iter__(self) -> Iterator[Any]:
        return (self._batch for _ in range(self._times))


def last_seconds(times: list[float]) -> float:
    """The median time between the ends of the last steps."""
    ends = times[-LAST - 1 :]
    return median(after - before for before, after in zip(ends, ends[1:], strict=False))


def quiet(device: torch.device) -> dict[str, Any]:
    """Arguments of a Trainer on one device that writes nothing."""
    return {
        "accelerator": "cuda" if device.type == "cuda" else "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }


def timed_fit(
    module: LightningModule, loader: Any, device: torch.device, *, steps: int, **trainer_options: Any
) -> Fitted:
    """Train so many steps on an emptied device."""
    emptied(device)
    clock = StepClock()
    callbacks = [*trainer_options.pop("callbacks", []), clock]
    trainer = Trainer(**quiet(device), **trainer_options, callbacks=callbacks, max_steps=steps)
    trainer.fit(module, loader)
    return clock.fitted()
