"""The limit that a plan must keep, and the goal that it optimises."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from lightning_memkit.memory.measure import budget_bytes, check_budget
from lightning_memkit.memory.units import format_bytes, is_auto, parse_bytes, parse_fraction
from lightning_memkit.prediction.devices import Device, card_here, device_named, gpu_here, means_here

Goal = Literal["speed", "memory", "exact"]

_NOMINAL = 1.08  # "24GiB" of a card on which a driver reports 22.5


@dataclass(frozen=True)
class Budget:
    """The memory that a run may use, the device that provides it, and the goal of its plan.

    Args:
        memory: ``"24GiB"``, a fraction of the device's memory (0.9, ``"90%"``), a count of bytes, or ``"auto"``: all
            that the device has (on this machine: all that is free). As everywhere in memkit it covers tensors
            and the allocator's cache of them: a GPU's context is outside of it, and limits the budget to what
            it leaves.
        device: ``"auto"``: the one that a Trainer would choose here; ``"cpu"``; ``"cuda"``: the GPU of this machine;
            the name of a GPU that need not be present (``"rtx4090"``, ``"RTX 4090"``; `prediction.devices.DEVICES`
            lists all), or a `Device` that describes one.
        goal: ``"speed"``: the fastest that fits, whatever its rounding (the table marks what changes
            numbers); ``"memory"``: the smallest peak; ``"exact"``: the fastest of those that compute the same
            as the module without a plan.
        headroom: the fraction of the memory that the predicted peak leaves free.

    Raises:
        ValueError: an argument is outside its range, the device is unknown or not here, or it has less memory.
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
        if not isinstance(self.headroom, (int, float)) or not 0 <= self.headroom < 1:
            raise ValueError(f"headroom={self.headroom!r} is outside [0, 1); for 5 % write 0.05.")
        device = self.target()
        if device is not None:
            self._bytes_of(device)

    def target(self) -> Device | None:
        """The GPU for which to plan; None for the CPU.

        Raises:
            ValueError: the device is unknown.
        """
        if not isinstance(self.device, str):
            return self.device
        name = self.device.strip().lower()
        if name == "auto":
            return _gpu_here()
        return None if name == "cpu" else card_here(name) or device_named(self.device)

    @property
    def here(self) -> str | None:
        """The GPU of this machine on which operators can be timed, as torch names it; None if it need not be here."""
        if not isinstance(self.device, str) or not means_here(self.device):
            return None
        name = self.device.strip().lower()
        return "cuda" if name == "auto" else name.replace("gpu", "cuda")

    def bytes(self) -> int:
        """What tensors and the allocator's cache of them may take."""
        device = self.target()
        if device is None:
            return budget_bytes(self.memory, torch.device("cpu"))
        return self._bytes_of(device)

    def _bytes_of(self, device: Device) -> int:
        if is_auto(self.memory):
            return device.usable_bytes
        fraction = parse_fraction(self.memory)
        if fraction is not None:
            return min(int(fraction * device.memory_bytes), device.usable_bytes)
        size = int(self.memory) if isinstance(self.memory, float) else self.memory
        asked = parse_bytes(size)
        if asked > _NOMINAL * device.memory_bytes:
            has = (
                f"{format_bytes(device.memory_bytes)}, {format_bytes(device.usable_bytes)} beside its context"
            )
            raise ValueError(
                f"budget={self.memory!r} is more than {device.name} has ({has}); write a size up to that, a fraction "
                'such as 0.9, or "auto"; of a card with more memory say how much (memkit plan --memory SIZE).'
            )
        return min(asked, device.usable_bytes)

    def usable_bytes(self) -> int:
        """The most that a predicted total may be: the budget less its headroom."""
        return int(self.bytes() * (1 - self.headroom))

    def __str__(self) -> str:
        device = self.target()
        return f"{format_bytes(self.bytes())} on {'the CPU' if device is None else device.name}"


def as_written(budget: str | int | float) -> str:
    """A budget as it was written; a count of bytes as a size."""
    return format_bytes(budget) if not isinstance(budget, str) and budget > 1 else str(budget)


def budget_on(device: str | Device, budget: Budget | str | int | float) -> Budget:
    """The budget, of this device's memory.

    Raises:
        ValueError: the budget has a device already.
    """
    if not isinstance(budget, Budget):
        return Budget(budget, device)
    if device != "auto":
        raise ValueError(
            f"device={device!r} stands beside a Budget, which has its own; write Budget({budget.memory!r}, "
            f"device={device!r})."
        )
    return budget


def _gpu_here() -> Device | None:
    """The first GPU of this machine, with the data sheet of its name or of the most similar known one."""
    return gpu_here() if torch.cuda.is_available() else None
