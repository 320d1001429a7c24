"""Remembers which parameters fit a fused step, so that the next step only compares identities and addresses."""

from collections.abc import Sequence
from itertools import repeat
from operator import is_
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_memkit.optim import native
from lightning_memkit.optim.blocks import first_element, is_sharded, local_part, quick_reads, shards
from lightning_memkit.optim.fused.operands import TENSORS, Operands
from lightning_memkit.optim.pieces import Slot
from lightning_memkit.optim.quantised import SCALES, row_length

State = dict[str, Any]


class SeatKind(NamedTuple):
    """The properties shared by parameters that are checked together.

    Args:
        group: the index of the optimizer's group.
        device: their device.
        is_sharded: they are DTensors.
        is_contiguous: they, their gradients and their states are contiguous; otherwise those of one parameter
            have equal strides.
        names: the names of their states, in the rule's order.
        has_low: the last of these is the low half.
        scales: how many of them, before the low half, are the scales of the codes before these.
    """

    group: int
    device: torch.device
    is_sharded: bool
    is_contiguous: bool
    names: tuple[str, ...]
    has_low: bool
    scales: int


class Seat:
    """A parameter that fits a fused step; keeps no tensor alive.

    Args:
        slot: the parameter's slot.
        states: its states, in the rule's order.
        names: the names of the states.
        has_low: the last of them is the low half.
    """

    __slots__ = ("count", "index", "kind", "length", "parameter", "places", "start", "states", "strides")

    def __init__(
        self, slot: Slot, states: Sequence[Tensor], names: tuple[str, ...], *, has_low: bool
    ) -> None:
        parameter = slot.parameter
        local = [local_part(tensor) for tensor in (parameter, *states)]
        contiguous = all(tensor.is_contiguous() for tensor in (*local, local_part(_gradient_of(parameter))))
        self.parameter, self.states = ref(parameter), tuple(ref(state) for state in states)
        self.index, self.start, self.count = slot.index, first_element(parameter), local[0].numel()
        self.places, self.strides = native.addresses(local), local[0].stride()
        scales = sum(name.endswith(SCALES) for name in names)
        self.length = (row_length(parameter) or 0) if scales else 0
        sharded = is_sharded(parameter)
        self.kind = SeatKind(slot.group, parameter.device, sharded, contiguous, names, has_low, scales)


class Seats:
    """Parameters of one kind that are stepped together, in columns.

    Args:
        places: their positions among all parameters that are stepped.
        seats: their seats.
    """

    def __init__(self, places: Sequence[int], seats: Sequence[Seat]) -> None:
        self.kind, self.places = seats[0].kind, list(places)
        self._parameters = [seat.parameter for seat in seats]
        self._states = [list(column) for column in zip(*(seat.states for seat in seats), strict=True)]
        self._begin = [list(column) for column in zip(*(seat.places for seat in seats), strict=True)]
        self._numbers = np.array(
            [(seat.index, seat.start, seat.count, seat.length) for seat in seats], np.uint64
        )
        self._strides = [seat.strides for seat in seats]
        self._none_is_empty = bool(self._numbers[:, 2].all())
        self._nothing = [None] * len(seats)
        # The columns are those of operands: weight, low half, gradient, first and second state. These are what is
        # kept: the weight, and its states.
        scales = self.kind.scales
        moments = len(self.kind.names) - self.kind.has_low - scales
        self._columns = [0, *range(3, 3 + moments), *range(5, 5 + scales), *repeat(1, self.kind.has_low)]
        self._addresses = np.zeros((len(seats), len(TENSORS)), np.uint64)
        for place, column in zip(self._columns, self._begin, strict=True):
            self._addresses[:, place] = column

    def find(self, parameters: list[Parameter], states: list[State | None]) -> Operands | None:
        """The tensors as they are now; None if one was replaced, moved or restrided since.

        Args:
            parameters: all parameters that are stepped, with their gradients.
            states: the optimizer's state of each.
        """
        places = self.places
        if len(places) != len(parameters):
            parameters, states = [parameters[place] for place in places], [states[place] for place in places]
        kept: list[list[Any]] = [parameters]
        if not all(map(is_, parameters, [known() for known in self._parameters])):
            return None
        if any(map(is_, states, repeat(None))):
            return None
        for name, known in zip(self.kind.names, self._states, strict=True):
            column: list[Any] = [state.get(name) for state in states]  # pyright: ignore[reportOptionalMemberAccess]
            if any(map(is_, column, repeat(None))) or not all(map(is_, column, [one() for one in known])):
                return None
            kept.append(column)
        with quick_reads():
            gradients = [parameter.grad for parameter in parameters]
        if self.kind.is_sharded:
            kept, gradients = [shards(column) for column in kept], shards(gradients)
        # Assigning to `.data` keeps a tensor's identity but may change its memory, dtype or device.
        if [native.addresses(column) for column in kept] != self._begin:
            return None
        return self._operands(kept, gradients) if self._is_alike(kept[0], gradients) else None

    def _is_alike(self, weights: list[Tensor], gradients: list[Any]) -> bool:
        """Whether gradients have the same layout as weights."""
        if self.kind.is_contiguous:
            contiguous = Tensor.is_contiguous
            return all(map(contiguous, weights)) and all(map(contiguous, gradients))
        alike = [one.stride() for one in weights] == self._strides
        return alike and [one.stride() for one in gradients] == self._strides

    def _operands(self, kept: list[list[Tensor]], gradients: list[Any]) -> Operands | None:
        dtypes = [gradient.dtype for gradient in gradients]
        wide = dtypes.count(torch.float32)
        if wide + dtypes.count(torch.bfloat16) != len(dtypes):
            return None
        addresses = self._addresses.copy()
        addresses[:, 2] = native.addresses(gradients)
        columns: list[list[Any]] = [self._nothing] * len(TENSORS)
        for place, column in zip(self._columns, kept, strict=True):
            columns[place] = column
        weights, lows, _, firsts, seconds, first_scales, second_scales = columns
        return Operands(
            indices=self._numbers[:, 0],
            weights=weights,
            lows=lows,
            gradients=gradients,
            firsts=firsts,
            seconds=seconds,
            first_scales=first_scales,
            second_scales=second_scales,
            lengths=self._numbers[:, 3],
            starts=self._numbers[:, 1],
            counts=self._numbers[:, 2],
            addresses=addresses,
            wide=np.array([dtype == torch.float32 for dtype in dtypes])
            if wide
            else np.zeros(len(dtypes), bool),
            is_uniform=wide in (0, len(dtypes)) and self._none_is_empty,
        )


def _gradient_of(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    return gradient
