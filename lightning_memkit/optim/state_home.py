"""Keeps optimizer states in host memory between steps and copies them to the device bucket by bucket.

While one bucket of parameters is stepped, the next one's states are being copied to the device and the last
one's back, each on its own stream: at most three buckets are on the device.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_memkit.optim.modes import LOW_STATES
from lightning_memkit.optim.pieces import Slot, buckets_within

_BYTES_BEFORE_THE_FIRST_STEP = 8  # per value: two float32 moments, as most optimizers keep
_HOST_MEMORY = ("cpu", "mps")  # Apple's GPU computes in the host's memory

HOME = "_memkit_state_home"  # the attribute of the optimizer

Advance = Callable[[Sequence[Slot]], None]


def has_own_memory(parameter: Tensor) -> bool:
    """Whether a parameter's device has memory separate from the host's."""
    return parameter.device.type not in _HOST_MEMORY


def is_at_home(state: Tensor) -> bool:
    """Whether a state is in host memory."""
    return state.device.type == "cpu"


def _host_room(like: Tensor, pin_memory: bool) -> Tensor:
    return torch.empty_like(like, device="cpu", pin_memory=pin_memory)


def _current_stream(device: torch.device) -> torch.Stream:
    return torch.accelerator.current_stream(device)


def home_of(optimizer: Optimizer) -> "StateHome | None":
    """The home of an optimizer's states between steps; None if they live beside their parameters."""
    return optimizer.__dict__.get(HOME)


class StateHome:
    """Keeps states in host memory and copies them to the device for their parameters' step.

    States are the tensors in ``optimizer.state``, including those in nested dicts, lists and tuples. Scalars
    stay where the optimizer keeps them: many are on the host by design.

    Args:
        bucket_bytes: bytes of states copied together; a parameter with more is a bucket of its own.
        pin_memory: keep them in page-locked memory, without which copies can't overlap with computation.
    """

    def __init__(self, bucket_bytes: int, pin_memory: bool) -> None:
        self.bucket_bytes = bucket_bytes
        self.pin_memory = pin_memory
        # Copies on their way back, oldest first; a device tensor may be freed after its event.
        self._leaving: deque[tuple[torch.Event, list[Tensor]]] = deque()
        self._streams: dict[torch.device, tuple[torch.Stream, torch.Stream]] = {}

    def visit(self, optimizer: Optimizer, ready: Sequence[Slot], advance: Advance) -> None:
        """Step parameters while their states are on the device.

        Args:
            optimizer: the optimizer of the states.
            ready: the parameters.
            advance: steps some of them. If it fails, their states are as they were before the call.
        """
        at_home = [slot for slot in ready if not has_own_memory(slot.parameter)]
        if at_home:
            advance(at_home)
        travelling = sorted((s for s in ready if has_own_memory(s.parameter)), key=_device_index)
        for device, group in groupby(travelling, key=lambda slot: slot.parameter.device):
            try:
                self._visit(optimizer, device, group, advance)
            except BaseException:
                # Memory must not be freed while a copy reads or writes it.
                for stream in self._streams_of(device):
                    stream.synchronize()
                self.settle()
                raise

    def _visit(
        self, optimizer: Optimizer, device: torch.device, group: Iterable[Slot], advance: Advance
    ) -> None:
        buckets = buckets_within(group, lambda slot: _bytes_of(optimizer, slot.parameter), self.bucket_bytes)
        coming = self._send(optimizer, next(buckets), device)
        while coming is not None:
            here, coming = coming, None
            self._wait_for_leaving(at_most=1)
            bucket = next(buckets, None)
            if bucket is not None:
                coming = self._send(optimizer, bucket, device)
            self._step(optimizer, here, advance)

    def settle(self) -> None:
        """Wait until every state is back in host memory."""
        self._wait_for_leaving(at_most=0)

    def take_home(self, value: Any) -> Any:
        """Copy a state's tensors to host memory; scalars and other values stay as they are."""
        return mapped(value, lambda tensor: self._room_for(tensor).copy_(tensor))

    def _send(self, optimizer: Optimizer, bucket: list[Slot], device: torch.device) -> "_Visitors":
        """Start the copies of a bucket's states to the device."""
        inward, _ = self._streams_of(device)
        pairs: list[tuple[Tensor, Tensor]] = []

        def seat(tensor: Tensor) -> Tensor:
            if not is_at_home(tensor):  # on the device already: it was loaded or restored behind our back
                return tensor
            pairs.append((torch.empty_like(tensor, device=device), tensor))
            return pairs[-1][0]

        states = {
            slot.parameter: mapped(optimizer.state[slot.parameter], seat)
            for slot in bucket
            if slot.parameter in optimizer.state
        }
        # The new tensors' memory belongs to the current stream, which may still use its previous contents.
        inward.wait_stream(_current_stream(device))
        with inward:
            for there, here in pairs:
                there.copy_(here, non_blocking=True)
        return _Visitors(bucket, device, states, inward.record_event())

    def _step(self, optimizer: Optimizer, here: "_Visitors", advance: Advance) -> None:
        current = _current_stream(here.device)
        current.wait_event(here.arrived)
        homes = {parameter: dict(optimizer.state[parameter]) for parameter in here.states}
        for parameter, state in here.states.items():
            optimizer.state[parameter].update(state)
        try:
            advance(here.bucket)
        except BaseException:
            for parameter, home in homes.items():
                optimizer.state[parameter].clear()
                optimizer.state[parameter].update(home)
            raise
        here.states.clear()
        self._bring_home(optimizer, here, homes)

    def _bring_home(
        self, optimizer: Optimizer, here: "_Visitors", homes: dict[Parameter, dict[str, Any]]
    ) -> None:
        """Start the copies of a bucket's stepped states to the host."""
        _, outward = self._streams_of(here.device)
        outward.wait_stream(_current_stream(here.device))
        leaving: list[Tensor] = []

        def leave(tensor: Tensor, home: Any) -> Tensor:
            if is_at_home(tensor):
                return tensor
            fits = (
                isinstance(home, Tensor) and home.shape == tensor.shape and home.dtype == tensor.dtype
            ) and is_at_home(home)
            leaving.append(tensor)
            return (home if fits else self._room_for(tensor)).copy_(tensor, non_blocking=True)

        with outward:
            for slot in here.bucket:
                if slot.parameter not in optimizer.state:
                    continue
                state, home = optimizer.state[slot.parameter], homes.get(slot.parameter, {})
                for name, value in state.items():
                    state[name] = mapped(value, partial(leave, home=home.get(name)))
        self._leaving.append((outward.record_event(), leaving))

    def _room_for(self, tensor: Tensor) -> Tensor:
        try:
            return _host_room(tensor, self.pin_memory)
        except RuntimeError as error:
            if not self.pin_memory:
                raise
            raise RuntimeError(
                f"{tensor.nbytes} bytes of pinned host memory for optimizer states can't be had ({error}); make "
                "room (`ulimit -l`, fewer loader workers), or write pin_memory=False, which is slower."
            ) from error

    def _streams_of(self, device: torch.device) -> tuple[torch.Stream, torch.Stream]:
        """The streams of copies to and from a device."""
        if device not in self._streams:
            self._streams[device] = torch.Stream(device), torch.Stream(device)
        return self._streams[device]

    def _wait_for_leaving(self, at_most: int) -> None:
        # The host runs ahead of the device. Without waiting it would allocate device memory for every bucket
        # before the first has left.
        while len(self._leaving) > at_most:
            event, _ = self._leaving[0]
            event.synchronize()
            self._leaving.popleft()


class _Visitors:
    """A bucket of parameters whose states are on the device, or being copied there."""

    def __init__(
        self,
        bucket: list[Slot],
        device: torch.device,
        states: dict[Parameter, dict[str, Any]],
        arrived: torch.Event,
    ) -> None:
        self.bucket = bucket
        self.device = device
        self.states = states
        self.arrived = arrived


def _device_index(slot: Slot) -> int:
    return slot.parameter.device.index or 0


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to the tensors of a state that have one dimension or more."""
    if isinstance(value, Tensor):
        return function(value) if value.dim() > 0 else value
    if isinstance(value, dict):
        return {key: mapped(item, function) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(item, function) for item in value)
    return value


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors of one dimension or more in a state."""
    found: list[Tensor] = []
    mapped(value, lambda tensor: found.append(tensor) or tensor)
    yield from found


def _bytes_of(optimizer: Optimizer, parameter: Parameter) -> int:
    state = optimizer.state.get(parameter, {})
    held = sum(tensor.nbytes for tensor in tensors_of(state))
    if all(name in LOW_STATES for name in state):  # low halves exist before the optimizer's own states
        held += _BYTES_BEFORE_THE_FIRST_STEP * parameter.numel()
    return held
