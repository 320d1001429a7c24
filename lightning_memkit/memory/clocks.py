"""A device's time and its host's, apart: an accelerator computes while its host launches what comes next."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

_SERIES, _RUNS_A_SERIES = 3, 10  # on a device with a queue, which takes a thousand


class Took(NamedTuple):
    """Seconds of one run on the device, and until the host had launched it."""

    device: float
    host: float


class Clocks(Protocol):
    """A device's clock beside its host's."""

    def keep_busy(self) -> None:
        """Launch something long: what is launched next waits, and then runs without a gap."""
        ...

    def mark(self) -> Any:
        """A moment in the device's queue."""
        ...

    def seconds_between(self, first: Any, second: Any) -> float:
        """Of the device, once it has reached both marks, for which this waits."""
        ...

    def now(self) -> float:
        """Of the host, in seconds."""
        ...


class DeviceClocks:
    """Those of an accelerator whose events tell times; 128 MiB there while in use. Not yet verified on a GPU."""

    DEVICES = ("cuda", "xpu")
    _BUSY_ROWS = 4096  # squared, a product of milliseconds

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._square: Tensor | None = None

    def keep_busy(self) -> None:
        """Launch something long: what is launched next waits, and then runs without a gap."""
        if self._square is None:
            self._square = torch.empty(self._BUSY_ROWS, self._BUSY_ROWS, device=self._device)
        torch.mm(self._square, self._square)

    def mark(self) -> torch.Event:
        """A moment in the device's queue."""
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def seconds_between(self, first: torch.Event, second: torch.Event) -> float:
        """Of the device, once it has reached both marks, for which this waits."""
        second.synchronize()
        return first.elapsed_time(second) / 1000

    def now(self) -> float:
        """Of the host, in seconds."""
        return time.perf_counter()


class WaitingClocks:
    """Those of any other accelerator: each mark waits for it, so its seconds are at least those of the launches."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)

    def keep_busy(self) -> None:
        """Do nothing: the next mark would wait for it."""

    def mark(self) -> float:
        """The host's time once the device has done all that was launched."""
        self._module.synchronize()
        return time.perf_counter()

    def seconds_between(self, first: float, second: float) -> float:
        """Of the device, with the launches that it waited for."""
        return second - first

    def now(self) -> float:
        """Of the host, in seconds."""
        return time.perf_counter()


def clocks_of(device: torch.device) -> Clocks | None:
    """A device's clock and its host's; None where the host is the device, or nothing is computed."""
    if device.type in ("cpu", "meta"):
        return None
    return DeviceClocks(device) if device.type in DeviceClocks.DEVICES else WaitingClocks(device)


def launched(run: Callable[[], object], *, clocks: Clocks) -> Took:
    """The time of a run on a device and on its host, each without a wait for the other; the least of a few.

    Args:
        run: launches it.
        clocks: of both.
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
