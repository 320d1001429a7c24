"""Puts low halves into an optimizer's state, in the form that its mode keeps: int16, int8 or bfloat16.

Low halves are captured as int16 when float32 weights are cast, or come from an optimizer of another mode. With the
mode's own form from the beginning, the first step is like the others: a fused kernel takes it, without float32
temporaries.
"""

from collections.abc import Iterable, Iterator, MutableMapping

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_memkit.optim.blocks import first_element, flat_views, local_part
from lightning_memkit.optim.modes import (
    LOW_STATES,
    low_dtype_of,
    low_state_of_tensor,
    narrow_,
    widen_,
)
from lightning_memkit.optim.pieces import Slot, is_compensated, piece_elements, slots
from lightning_memkit.optim.shadow_options import ShadowOptions


@torch.no_grad()
def put_low_halves(
    optimizer: Optimizer,
    engine: ShadowOptions,
    low_halves: MutableMapping[Parameter, Tensor],
    ready: Iterable[Slot] | None = None,
) -> None:
    """Replace the low halves in an optimizer's state by these; weights that have none here keep theirs.

    Args:
        optimizer: whose state they are put into; each is kept as it is if it has the form of the mode.
        engine: its mode, and the noise by which low halves of other forms are rounded.
        low_halves: by parameter, of any form; the same tensor is kept where it is on the parameter's device. What is
            put takes the place of what it was made from, which need not be alive beside it.
        ready: of these parameters only, whose low halves are taken out; None for all.
    """
    dtype = None if engine.mode is None else low_dtype_of(engine.mode)
    if dtype is None:
        return
    for slot in slots(optimizer) if ready is None else ready:
        given = low_halves.get(slot.parameter)
        if given is None or not is_compensated(slot.parameter):
            continue
        low = given.to(slot.parameter.device)
        if low.dtype != dtype:
            low = _formed(engine, slot, low, dtype)
        state = optimizer.state[slot.parameter]
        for name in LOW_STATES:
            state.pop(name, None)
        state[low_state_of_tensor(low)] = low
        if ready is not None:
            del low_halves[slot.parameter]
        elif low is not given:
            low_halves[slot.parameter] = low
    engine.rounding.end_step()


def _formed(engine: ShadowOptions, slot: Slot, low: Tensor, dtype: torch.dtype) -> Tensor:
    """A low half of another form in the mode's, int8 or bfloat16 or int16.

    One in int16 is rounded to nearest, which loses least where it happens once. Its weight stays as it is: other ranks
    and optimizers have it, too. Of other forms the weight need not be the nearest bfloat16, and both are rounded as in
    a step.
    """
    formed = torch.empty_like(slot.parameter, dtype=dtype)
    tensors = local_part(slot.parameter), local_part(low), local_part(formed)
    start = first_element(slot.parameter)
    for high, before, after in slices_of(*tensors):
        if before.dtype == torch.int16:
            _round_(high, before, after)
        else:
            _round_both_(engine, (slot.index, start), (high, before, after))
        start += high.numel()
    return formed


# Functions, so that the temporaries of a slice end before those of the next one begin.


def _round_(high: Tensor, before: Tensor, after: Tensor) -> None:
    """Write an int16 low half as the nearest low byte or compensation."""
    if after.dtype == torch.int8:
        # 1 of 512 would round up to 128, which int8 lacks; at 127 it is off by less than the 24th bit.
        after.copy_(before.int().add_(0x80).bitwise_right_shift_(8).clamp_(max=0x7F))
        return
    master = torch.empty_like(high, dtype=torch.float32)
    widen_(high, before, master)
    # Infinity has no compensation: inf - inf would be NaN.
    after.copy_(master.sub_(high).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0))


def _round_both_(engine: ShadowOptions, place: tuple[int, int], tensors: tuple[Tensor, ...]) -> None:
    """Write the weight and low half of a float32 value anew, as a step does."""
    high, before, after = tensors
    assert engine.mode is not None  # else there would be no form to write
    master = torch.empty_like(high, dtype=torch.float32)
    widen_(high, before, master)
    narrow_(engine.mode, master, high, after, engine.rounding, place)


def slices_of(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same slices of each tensor, so that float32 temporaries are bounded as in a step."""
    flat = flat_views(*tensors)
    if flat is None:
        yield tensors
        return
    yield from zip(*(tensor.split(piece_elements(tensor.device)) for tensor in flat), strict=True)
