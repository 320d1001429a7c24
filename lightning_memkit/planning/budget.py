"""The limit that a plan must keep, and the goal that it optimises."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from lightning_memkit.memory.measure import budget_bytes, check_budget
from lightning_memkit.memory.units import format_bytes, parse_bytes, parse_fraction
from lightning_memkit.prediction.devices import Device, device_named, most_like

Goal = Literal["speed", "memory", "exact"]


@dataclass(frozen=True)
class Budget:
    """The memory that a run may use, the device that provides it, and the goal of its plan.

    Args:
        memory: ``"24GiB"``, a fraction of the device's memory (0.9, ``"90%"``), a count of bytes, or ``"auto"``: all
            that the device has (on this machine: all that is free). As everywhere in memkit it covers tensors
            and the allocator's cache of them: a GPU's context is outside of it, and limits the budget to what
            it leaves.
        device: ``"auto"``: the one that a Trainer would choose here; ``"cpu"``; the name of a GPU that need
            not be present (``"rtx4090"``, ``"RTX 4090"``; `prediction.devices.DEVICES` lists all), or a `Device` that
            describes one.
        goal: ``"speed"``: the fastest that fits, whatever its rounding (the table marks what changes
            numbers); ``"memory"``: the smallest peak; ``"exact"``: the fastest of those that compute the same
            as the module without a plan.
        headroom: the fraction of the memory that the predicted peak leaves free.

    Raises:
        ValueError: an argument is outside its range, or the device is unknown.
    """

    memory: str | int | float = "auto"
    device: str | Device = "auto"
    goal: Goal = "speed"
    headroom: float = 0.05

    def __post_init__(self) -> None:
        check_budget(self.memory)
        if self.goal not in get_args(Goal):
            known = ", ".join(map(repr, get_args(Goal)))
            raise ValueError(f"goal={self.goal!r} is unknown; choose one of {known}.")
        if not 0 <= self.headroom < 1:
            raise ValueError(f"headroom={self.headroom} is outside [0, 1); for 5 % write 0.05.")
        self.target()

    def target(self) -> Device | None:
        """The GPU for which to plan; None for the CPU.

        Raises:
            ValueError: the device is unknown.
        """
        if self.device == "auto":
            return _gpu_here()
        return None if self.device == "cpu" else device_named(self.device)

    def bytes(self) -> int:
        """What tensors and the allocator's cache of them may take."""
        device = self.target()
        if device is None:
            return budget_bytes(self.memory, torch.device("cpu"))
        if self.memory == "auto":
            return device.usable_bytes
        fraction = parse_fraction(self.memory)
        if fraction is not None:
            return min(int(fraction * device.memory_bytes), device.usable_bytes)
        size = int(self.memory) if isinstance(self.memory, float) else self.memory
        return min(parse_bytes(size), device.usable_bytes)

    def usable_bytes(self) -> int:
        """The most that a predicted total may be: the budget less its headroom."""
        return int(self.bytes() * (1 - self.headroom))

    def __str__(self) -> str:
        device = self.target()
        return f"{format_bytes(self.bytes())} on {'the CPU' if device is None else device.name}"


def _gpu_here() -> Device | None:
    """The first GPU of this machine, with the data sheet of its name or of the most similar known one."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return most_like(properties.name, properties.total_memory)
