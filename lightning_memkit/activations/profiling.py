"""Measures the time and bytes of a recorded block's operators by running them again, and checks their results."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_memkit.activations.recorded import Operator, Value, ValuePlace
from lightning_memkit.activations.tape import Tape
from lightning_memkit.memory.clocks import Clocks, Took, clocks_of, launched

_REPEATS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorCost:
    """The cost of one operator of a block.

    Args:
        func: the operator.
        seconds: the time of recomputing it, on the device that computes.
        host_seconds: the host's time to launch it, without a tape's work; 0 if the host is the device.
        sizes: the bytes of each of its outputs.
        saves: which of its outputs autograd saves.
        inputs: what it reads, as (index of an operator, index of its output).
        pinned: it must not run again; its outputs are always kept.
        lost: which of its outputs the forward overwrote in place, so that they can't be kept; empty for none.
    """

    func: Any
    seconds: float
    sizes: tuple[int, ...]
    saves: tuple[bool, ...]
    inputs: tuple[tuple[int, int], ...]
    pinned: bool
    host_seconds: float = 0.0
    lost: tuple[bool, ...] = ()

    def is_lost(self, position: int) -> bool:
        """Whether the forward overwrote this output."""
        return bool(self.lost) and self.lost[position]

    @property
    def saved_bytes(self) -> int:
        """The bytes of its outputs that autograd saves."""
        return sum(size for size, saved in zip(self.sizes, self.saves, strict=True) if saved)


@dataclass(frozen=True, kw_only=True)
class BlockProfile:
    """A block's forward: its operators, and the bytes of its inputs, which stay in memory in any case."""

    operators: tuple[OperatorCost, ...]
    input_bytes: int
    shapes: tuple[Any, ...]

    @property
    def saved_bytes(self) -> int:
        """The bytes that autograd saves of the block without checkpointing, excluding its inputs."""
        return sum(operator.saved_bytes for operator in self.operators)


class Profiler:
    """Measures recorded blocks; equal operators on equal shapes are measured once.

    On an accelerator, device and host are timed without synchronizing them, in about thirty runs of each
    operator.

    Args:
        clocks_of: returns the clocks of a device and its host; None if the host is the device.
    """

    def __init__(self, clocks_of: Callable[[torch.device], Clocks | None] = clocks_of) -> None:
        self._clocks_of = clocks_of
        self._clocks: dict[torch.device, Clocks | None] = {}
        self._known: dict[Any, Took] = {}

    def on_accelerator(self, tensors: list[Tensor]) -> bool:
        """Whether any tensor is on a device that works in parallel to its host."""
        return any(self._clocks_of(device) is not None for device in {tensor.device for tensor in tensors})

    def profile(self, tape: Tape, outputs: list[Tensor], input_bytes: int, shapes: tuple) -> BlockProfile:
        """Run every operator again on its own inputs, time it, and pin those whose results differ in any bit.

        Args:
            tape: of a forward that kept everything, before `finish`.
            outputs: the block's outputs, which stay in memory in any case.
            input_bytes: bytes of the block's inputs that no other block counts.
            shapes: the shapes of the block's inputs.
        """
        outside = {tensor.untyped_storage()._cdata for tensor in outputs}
        costs = []
        places: dict[Value, tuple[int, int]] = {}
        with tape.below_autograd():
            for operator in tape.operators:
                took = self._measure(tape, operator)
                made = operator.made()
                places.update({value: (operator.index, position) for position, value in enumerate(made)})
                costs.append(
                    OperatorCost(
                        func=operator.func,
                        seconds=took.device,
                        host_seconds=took.host,
                        sizes=tuple(_size(value, outside) for value in made),
                        saves=tuple(bool(value.notes) for value in made),
                        inputs=tuple({places[value] for value in operator.inputs if value in places}),
                        pinned=operator.pinned,
                        lost=tuple(value.find() is None for value in made),
                    )
                )
        self._clocks.clear()  # they hold device memory
        if any(
            cost.host_seconds for cost in costs
        ):  # beside an accelerator, computation on the host counts as the host's time
            costs = [cost if cost.host_seconds else _on_host(cost) for cost in costs]
        return BlockProfile(operators=tuple(costs), input_bytes=input_bytes, shapes=shapes)

    def _measure(self, tape: Tape, operator: Operator) -> Took:
        if operator.pinned:
            return Took(0.0, 0.0)
        contents = _contents(tape, operator)
        made = operator.outputs_of(dict(contents))  # also a warm-up
        for value, storage in zip(operator.outputs, made, strict=True):
            now = None if value is None else value.find()
            if now is not None and not operator.kind.unfilled and not _same(now, storage):
                operator.pinned = True
        key = _key(operator)
        if key not in self._known:
            device = made[0].device if made else torch.device("cpu")
            self._known[key] = self._timed(operator, contents, device)
        return self._known[key]

    def _timed(
        self, operator: Operator, contents: dict[Value, torch.UntypedStorage], device: torch.device
    ) -> Took:
        if device not in self._clocks:
            self._clocks[device] = self._clocks_of(device)
        clocks = self._clocks[device]
        if clocks is not None:
            # The operator alone: a tape's own work is counted separately, and only where there is a tape.
            return operator.given_to(lambda run: launched(run, clocks=clocks), dict(contents))
        runs = (_seconds(lambda: operator.outputs_of(dict(contents))) for _ in range(_REPEATS))
        return Took(min(runs), 0.0)


def _contents(tape: Tape, operator: Operator) -> dict[Value, torch.UntypedStorage]:
    """What an operator's inputs held when it ran; values that were overwritten since are recomputed."""
    contents: dict[Value, torch.UntypedStorage] = {}
    for earlier in tape.closure(operator.inputs):
        known = {value: contents.get(value) or value.find() for value in earlier.inputs}
        for value, storage in zip(earlier.outputs, earlier.outputs_of(known), strict=True):  # pyright: ignore[reportArgumentType]
            if value is not None:
                contents[value] = storage
    for value in operator.inputs:
        storage = contents.get(value) or value.find()
        assert storage is not None
        contents[value] = storage
    return contents


def _same(one: torch.UntypedStorage, other: torch.UntypedStorage) -> bool:
    if one.nbytes() != other.nbytes():
        return False
    left, right = (
        torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # pyright: ignore[reportArgumentType, reportCallIssue]
        for storage in (one, other)
    )
    return torch.equal(left, right)


def _size(value: Value, outside: set[int]) -> int:
    storage = value.find()
    return 0 if storage is None or storage._cdata in outside else value.size_bytes


def _on_host(cost: OperatorCost) -> OperatorCost:
    return replace(cost, seconds=0.0, host_seconds=cost.seconds)


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _key(operator: Operator) -> Any:
    def of(value: Any) -> Any:
        if isinstance(value, ValuePlace):
            return (tuple(value.size), value.stride, value.dtype, value.device)
        if isinstance(value, (list, tuple)):
            return tuple(of(item) for item in value)
        return str(value)

    return operator.func, of(operator.args), of(list(operator.kwargs.values()))
