"""The state of torch's global generators before an operator that draws from one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class RandomState:
    """The states of the generators that an operator may draw from: the host's, and its device's if it has one."""

    def __init__(self, devices: set[torch.device]) -> None:
        self._host = torch.get_rng_state()
        self._devices = {
            device: torch.get_device_module(device).get_rng_state(device)
            for device in devices
            if hasattr(torch.get_device_module(device), "get_rng_state")
        }

    @classmethod
    def of(cls, arguments: Any) -> "RandomState":
        """The states now, for the devices among an operator's arguments."""
        return cls({device for device in _devices(arguments) if device.type not in ("cpu", "meta")})

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Run from this state, then go on from the one before."""
        now = RandomState(set(self._devices))
        self._set()
        try:
            yield
        finally:
            now._set()

    def _set(self) -> None:
        torch.set_rng_state(self._host)
        for device, state in self._devices.items():
            torch.get_device_module(device).set_rng_state(state, device)


def _devices(arguments: Any) -> Iterator[torch.device]:
    if isinstance(arguments, Tensor):
        yield arguments.device
    elif isinstance(arguments, torch.device):
        yield arguments
    elif isinstance(arguments, dict):
        yield from _devices(tuple(arguments.values()))
    elif isinstance(arguments, (list, tuple)):
        for item in arguments:
            yield from _devices(item)
