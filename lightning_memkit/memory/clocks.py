"""Measure device time and host time separately: an accelerator computes while its host launches more work."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

_SERIES, _RUNS_A_SERIES = 3, 10  # well below the thousand launches that a device queues


class Took(NamedTuple):
    """Seconds that one run took on the device, and on the host until it was launched."""

    device: float
    host: float


class Clocks(Protocol):
    """A device's clock and its host's."""

    def keep_busy(self) -> None:
        """Launch a long operation, so that what is launched next queues up and then runs without gaps."""
        ...

    def mark(self) -> Any:
        """Mark a moment in the device's queue."""
        ...

    def seconds_between(self, first: Any, second: Any) -> float:
        """Device seconds between two marks; waits until the device has reached both."""
        ...

    def now(self) -> float:
        """The host's time in seconds."""
        ...


class DeviceClocks:
    """Clocks of an accelerator with timing events; uses 128 MiB of it.

    Last run on a GPU: 2026-11-27, H200, torch 2.11; its times were compared with no other clock's.
    """

    DEVICES = ("cuda", "xpu")
    _BUSY_ROWS = 4096  # of a square matrix whose product takes milliseconds

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._square: Tensor | None = None

    def keep_busy(self) -> None:
        """Launch a long operation, so that what is launched next queues up and then runs without gaps."""
        if self._square is None:
            self._square = torch.empty(self._BUSY_ROWS, self._BUSY_ROWS, device=self._device)
        torch.mm(self._square, self._square)

    def mark(self) -> torch.Event:
        """Mark a moment in the device's queue."""
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def seconds_between(self, first: torch.Event, second: torch.Event) -> float:
        """Device seconds between two marks; waits until the device has reached both."""
        second.synchronize()
        return first.elapsed_time(second) / 1000

    def now(self) -> float:
        """The host's time in seconds."""
        return time.perf_counter()


class WaitingClocks:
    """Clocks of any other accelerator: marks synchronise, so device seconds include the launches."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)

    def keep_busy(self) -> None:
        """Do nothing: the next mark would wait for it."""

    def mark(self) -> float:
        """The host's time once the device has done everything that was launched."""
        self._module.synchronize()
        return time.perf_counter()

    def seconds_between(self, first: float, second: float) -> float:
        """Seconds between two marks, including the launches."""
        return second - first

    def now(self) -> float:
        """The host's time in seconds."""
        return time.perf_counter()


def clocks_of(device: torch.device) -> Clocks | None:
    """The clocks of a device and its host; None if the host is the device, or nothing is computed."""
    if device.type in ("cpu", "meta"):
        return None
    return DeviceClocks(device) if device.type in DeviceClocks.DEVICES else WaitingClocks(device)


def launched(run: Callable[[], object], *, clocks: Clocks) -> Took:
    """The time of a run on a device and on its host, neither waiting for the other; the least of a few.

    Args:
        run: launches the work.
        clocks: of device and host.
    """
    run()
    device, host = float("inf"), float("inf")
    for _ in range(_SERIES):
        clocks.keep_busy()
        first, began = clocks.mark(), clocks.now()
        for _ in range(_RUNS_A_SERIES):
            run()
        took, last = clocks.now() - began, clocks.mark()
        device = min(device, clocks.seconds_between(first, last) / _RUNS_A_SERIES)
        host = min(host, took / _RUNS_A_SERIES)
    return Took(device, host)
