"""The state of torch's global generators before an operator that draws random numbers."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class OperatorRandomState:
    """The states of generators that an operator may use: the host's, its device's, those among its arguments."""

    def __init__(self, devices: set[torch.device], generators: Iterable[torch.Generator] = ()) -> None:
        self._generators = [(generator, generator.get_state()) for generator in generators]
        self._host = torch.get_rng_state()
        self._devices = {
            device: torch.get_device_module(device).get_rng_state(device)
            for device in devices
            if hasattr(torch.get_device_module(device), "get_rng_state")
        }

    @classmethod
    def of(cls, arguments: Any) -> "OperatorRandomState":
        """The current states, for the devices and the generators among an operator's arguments."""
        found = list(_sources(arguments))
        generators = [one for one in found if isinstance(one, torch.Generator)]
        devices = {one for one in found if isinstance(one, torch.device)}
        return cls({device for device in devices if device.type not in ("cpu", "meta")}, generators)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Run the body from these states, then restore the current ones."""
        now = OperatorRandomState(set(self._devices), [generator for generator, _ in self._generators])
        self._set()
        try:
            yield
        finally:
            now._set()

    def _set(self) -> None:
        torch.set_rng_state(self._host)
        for device, state in self._devices.items():
            torch.get_device_module(device).set_rng_state(state, device)
        for generator, state in self._generators:
            generator.set_state(state)


def _sources(arguments: Any) -> Iterator[torch.device | torch.Generator]:
    if isinstance(arguments, Tensor):
        yield arguments.device
    elif isinstance(arguments, (torch.device, torch.Generator)):
        yield arguments
    elif isinstance(arguments, dict):
        yield from _sources(tuple(arguments.values()))
    elif isinstance(arguments, (list, tuple)):
        for item in arguments:
            yield from _sources(item)
