"""Float32 shadows of slices of bfloat16 parameters: made before the stock step, written back after it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_memkit.optim.blocks import first_element, flat_views, local_part
from lightning_memkit.optim.group_scalars import copied
from lightning_memkit.optim.modes import LOW_STATES, low_dtype_of, low_state_of, narrow_, widen_
from lightning_memkit.optim.pieces import Piece, Scratch
from lightning_memkit.optim.quantised import (
    CODES,
    SCALES,
    decode_,
    encode_,
    is_quantisable,
    is_quantised_name,
    plain_name,
    room_in,
    row_length,
)
from lightning_memkit.optim.shadow_options import ShadowOptions
from lightning_memkit.optim.state_dtypes import storage_of


@dataclass
class _StepProgress:
    """A parameter's state while its slices are stepped one after the other.

    Attributes:
        before: the optimizer's state before the step.
        low: the low half before the step, under its name; empty if there is none yet.
        after: the optimizer's state after the step, for the slices stepped so far.
        low_after: the low half after the step.
    """

    before: dict[str, Any]
    low: dict[str, Tensor]
    after: dict[str, Any] = field(default_factory=dict)
    low_after: dict[str, Tensor] = field(default_factory=dict)


class PieceShadows:
    """The shadows of one optimizer step; the slices of a large parameter take turns in the same scratch memory."""

    def __init__(self, engine: ShadowOptions, optimizer: Optimizer) -> None:
        self._engine = engine
        self._optimizer = optimizer
        self._scratch = Scratch()
        self._progress: dict[Parameter, _StepProgress] = {}

    def begin_bucket(self, bucket: list[Piece]) -> None:
        """Release the memory of the last bucket's shadows, and make room for this bucket's."""
        self._scratch.begin_bucket(bucket)

    def forget(self, failed: Iterable[Parameter]) -> None:
        """Drop the progress of parameters whose step failed."""
        for parameter in failed:
            self._progress.pop(parameter, None)
        self._scratch = Scratch()

    def open(self, piece: Piece) -> Parameter:
        """The float32 shadow of a slice, with its gradient."""
        parameter = piece.slot.parameter
        if parameter not in self._progress:
            state = self._optimizer.state[parameter] if parameter in self._optimizer.state else {}
            self._progress[parameter] = _StepProgress(
                before={name: value for name, value in state.items() if name not in LOW_STATES},
                low={name: state[name] for name in LOW_STATES if name in state},
            )
        low = next(iter(self._progress[parameter].low.values()), None)
        weight = self._scratch.like(piece.view(parameter))
        widen_(
            local_part(piece.view(parameter)),
            None if low is None else local_part(piece.view(low)),
            local_part(weight),
        )
        shadow = Parameter(weight)
        vars(shadow).update(vars(parameter))  # attributes that users set on parameters, such as rates
        assert parameter.grad is not None
        shadow.grad = self._float32(piece.view(parameter.grad))
        return shadow

    def widened(self, piece: Piece) -> dict[str, Any]:
        """The state of a slice as the stock step sees it: bfloat16 moments in float32, no low half."""
        seen: dict[str, Any] = {}
        group = self._optimizer.param_groups[piece.slot.group]
        for name, value in self._progress[piece.slot.parameter].before.items():
            if (
                name == "step"
                and isinstance(value, Tensor)
                and (group.get("fused") or group.get("capturable"))
            ):
                value = value.to(piece.slot.parameter.device)  # fused steps keep the count on the host
            plain = plain_name(name)
            if plain is not None:
                seen[plain] = self._decoded(plain, piece)
            elif is_quantised_name(name):  # the scales of these
                continue
            elif isinstance(value, Tensor) and value.shape == piece.slot.parameter.shape:
                part = piece.view(value)
                seen[name] = self._float32(part) if value.dtype == torch.bfloat16 else part
            elif isinstance(value, Tensor) and value.dtype == torch.bfloat16:
                seen[name] = value.float()  # a factored moment, from a checkpoint of uncompensated training
            else:  # counters advance once a step, so each slice gets its own copy
                seen[name] = value if piece.whole else copied(value)
        return seen

    def _decoded(self, plain: str, piece: Piece) -> Tensor:
        """The float32 moments of a slice whose state has 8 bits."""
        before = self._progress[piece.slot.parameter].before
        codes, scales = before[plain + CODES], before[plain + SCALES]
        wide = self._scratch.like(piece.view(codes))
        flat = flat_views(local_part(piece.view(codes)), local_part(wide))
        assert flat is not None  # `row_length` says so of the parameter
        decode_(plain, flat[0], _rows_of(piece, scales), flat[1])
        return wide

    def _float32(self, part: Tensor) -> Tensor:
        if part.dtype == torch.float32:
            return part.detach()
        wide = self._scratch.like(part)
        local_part(wide).copy_(local_part(part))
        return wide

    def close(self, piece: Piece, shadow: Parameter, stepped: dict[str, Any]) -> None:
        """Write a stepped slice back into parameter, state and low half."""
        parameter = piece.slot.parameter
        progress = self._progress[parameter]
        for name, value in stepped.items():
            self._store(name, value, stepped, piece, shadow)
        self._narrow(piece, local_part(shadow), progress)
        if piece.last:
            state = self._optimizer.state[parameter]
            state.clear()
            state.update(progress.after)
            state.update(progress.low_after)
            del self._progress[parameter]

    def _store(
        self, name: str, value: Any, stepped: Mapping[str, Any], piece: Piece, shadow: Parameter
    ) -> None:
        parameter, progress = piece.slot.parameter, self._progress[piece.slot.parameter]
        if not isinstance(value, Tensor) or value.shape != shadow.shape:
            progress.after[name] = value
            return
        group = self._optimizer.param_groups[piece.slot.group]
        rounds = self._engine.states != "exact"
        storage = storage_of(name, value, stepped, group, shadow) if rounds else "keep"
        if storage != "keep" and self._engine.states == "8-bit" and self._encode(name, stepped, piece):
            return
        if storage == "keep" and piece.whole and not self._scratch.owns(value):
            progress.after[name] = value
            return
        dtype = value.dtype if storage == "keep" else torch.bfloat16
        if name not in progress.after:
            progress.after[name] = _reuse(progress.before.get(name), parameter, dtype)
        source, target = local_part(value), local_part(piece.view(progress.after[name]))
        if storage == "stochastic":
            start = first_element(parameter) + piece.start
            self._engine.rounding.round_(source, target, (piece.slot.index, name, start))
        elif source.data_ptr() != target.data_ptr() or source.dtype != target.dtype:
            target.copy_(source)

    def _encode(self, name: str, stepped: Mapping[str, Any], piece: Piece) -> bool:
        """Store the moments of a slice in 8 bits, if the parameter's may have them."""
        parameter, progress = piece.slot.parameter, self._progress[piece.slot.parameter]
        length = row_length(parameter) if is_quantisable(name, stepped) else None
        flat = flat_views(local_part(stepped[name]), local_part(piece.view(parameter)))
        if length is None or flat is None:
            return False
        if name + CODES not in progress.after:
            progress.after.update(room_in(progress.before, parameter, name, length))
        (codes,) = flat_views(local_part(piece.view(progress.after[name + CODES]))) or (None,)
        assert codes is not None
        start = first_element(parameter) + piece.start
        noise = self._engine.rounding.noise(flat[0], (piece.slot.index, name, start))
        encode_(name, flat[0], codes, _rows_of(piece, progress.after[name + SCALES]), noise)
        return True

    def _narrow(self, piece: Piece, master: Tensor, progress: _StepProgress) -> None:
        """Write the float32 master into the weight, and the remainder into the low half."""
        mode, parameter = self._engine.mode, piece.slot.parameter.detach()
        assert mode is not None
        name, low = low_state_of(mode), None
        if name is not None:
            if name not in progress.low_after:
                dtype = low_dtype_of(mode)
                assert dtype is not None
                progress.low_after[name] = _reuse(progress.low.get(name), parameter, dtype)
            low = local_part(piece.view(progress.low_after[name]))
        high, stream = (
            local_part(piece.view(parameter)),
            (piece.slot.index, first_element(piece.slot.parameter) + piece.start),
        )
        narrow_(mode, master, high, low, self._engine.rounding, stream)


def _rows_of(piece: Piece, scales: Tensor) -> Tensor:
    """The scales of a slice that consists of whole rows."""
    scales = local_part(scales)
    elements = local_part(piece.slot.parameter).numel()
    return scales if piece.whole else scales[piece.start * len(scales) // elements :][: _rows(piece, scales)]


def _rows(piece: Piece, scales: Tensor) -> int:
    return (piece.stop - piece.start) * len(scales) // local_part(piece.slot.parameter).numel()


def _reuse(previous: Any, like: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor to write to: the previous one if it fits, else a new one."""
    if isinstance(previous, Tensor) and previous.dtype == dtype and previous.shape == like.shape:
        return previous
    return torch.empty_like(like, dtype=dtype)
