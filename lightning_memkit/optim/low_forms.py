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
    Mode,
    low_dtype_of,
    low_state_of,
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
        engine: its mode, and the noise by which a low half of another form is rounded.
        low_halves: by parameter, of any form; the same tensor is kept where it is on the parameter's device. What is
            put takes the place of what it was made from, which need not be alive beside it.
        ready: of these parameters only, whose low halves are taken out; None for all.
    """
    if engine.mode is None or low_state_of(engine.mode) is None:
        return
    for slot in slots(optimizer) if ready is None else ready:
        given = low_halves.get(slot.parameter)
        if given is None or not is_compensated(slot.parameter):
            continue
        low = _formed(engine, slot, given.to(slot.parameter.device))
        state = optimizer.state[slot.parameter]
        for name in LOW_STATES:
            state.pop(name, None)
        state[low_state_of_tensor(low)] = low
        if ready is not None:
            del low_halves[slot.parameter]
        elif low is not given:
            low_halves[slot.parameter] = low
    engine.rounding.end_step()


def _formed(engine: ShadowOptions, slot: Slot, low: Tensor) -> Tensor:
    """A low half in the mode's form, rounded stochastically where that keeps fewer bits.

    An int16 one is the rest of a weight that is the nearest bfloat16, which stays as it is: other ranks and optimizers
    have it, too. With one of another form the weight may be the other neighbour, and is rounded as in a step.
    """
    dtype = low_dtype_of(engine.mode) if engine.mode is not None else None
    if engine.mode is None or dtype is None or low.dtype == dtype:
        return low
    formed = torch.empty_like(slot.parameter, dtype=dtype)
    tensors = local_part(slot.parameter), local_part(low), local_part(formed)
    start = first_element(slot.parameter)
    for high, before, after in slices_of(*tensors):
        _write(engine, engine.mode, (slot.index, start), (high, before, after))
        start += high.numel()
    return formed


def _write(engine: ShadowOptions, mode: Mode, place: tuple[int, int], tensors: tuple[Tensor, ...]) -> None:
    """Write a slice in the mode's form; its temporaries end here, before the next one's begin."""
    high, before, after = tensors
    stream = (place[0], "weight", place[1])
    if before.dtype == torch.int16 and mode == "split24":
        noise = engine.rounding.noise(before, stream).bitwise_and_(0xFF)
        after.copy_(noise.add_(before).bitwise_right_shift_(8).clamp_(-128, 127))
        return
    master = torch.empty_like(high, dtype=torch.float32)
    widen_(high, before, master)
    if before.dtype == torch.int16 and mode == "kahan":
        rest = master.sub_(high).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        engine.rounding.round_(rest, after, stream)
    else:
        narrow_(mode, master, high, after, engine.rounding, place)


def slices_of(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same slices of each tensor, so that float32 temporaries are bounded as in a step."""
    flat = flat_views(*tensors)
    if flat is None:
        yield tensors
        return
    yield from zip(*(tensor.split(piece_elements(tensor.device)) for tensor in flat), strict=True)
