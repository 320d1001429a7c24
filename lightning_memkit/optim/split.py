"""A float32 weight as a bfloat16 high half and an int16 low half: exact, 2 + 2 bytes a parameter.

The high half is the nearest bfloat16, so the model computes with it directly. The low half is the rest of the
32-bit pattern, read as a signed number: ``bits(weight) == (bits(high) << 16) + low``. Ties round away from
zero (torch's cast rounds them to even), because a tie rounded down would leave 32768, which int16 lacks.
Float32 values within 0.2 % of the largest one become infinity in the high half and still join back exactly.
"""

import torch
from torch import Tensor

from lightning_memkit.optim.blocks import blocks, surely_finite

LOW_HALF = "low_half"  # its key in an optimizer's state


def split_(master: Tensor, high: Tensor, low: Tensor) -> None:
    """Write the halves of ``master`` (float32) into ``high`` (bfloat16) and ``low`` (int16), all of one shape.

    NaN becomes the canonical NaN with a low half of 0: its payload could otherwise carry into the sign bit.
    """
    for master_block, high_block, low_block in blocks(master, high, low):
        bits = master_block.view(torch.int32)
        high_block.view(torch.int16).copy_(bits.add(0x8000).bitwise_right_shift_(16))
        low_block.copy_(bits)  # keeps the lowest 16 bits, read as a signed number
        if not surely_finite(master_block):
            not_a_number = master_block.isnan()
            high_block.masked_fill_(not_a_number, torch.nan)
            low_block.masked_fill_(not_a_number, 0)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """The bfloat16 high half and int16 low half of a float32 tensor, as new tensors of its shape."""
    high = torch.empty_like(master, dtype=torch.bfloat16)
    low = torch.empty_like(master, dtype=torch.int16)
    split_(master.detach(), high, low)
    return high, low


def join_(high: Tensor, low: Tensor, out: Tensor) -> None:
    """Write the float32 weights of both halves into ``out``.

    A weight that was set to zero from outside may still have its old low half. Joined with zero, a negative
    low half would be the pattern of a NaN; `split_` never writes this pair, so reading it as 0 stays exact.
    """
    for high_block, low_block, out_block in blocks(high, low, out):
        high_bits = high_block.view(torch.int16)
        # Negative only if both are: the high half's magnitude minus one (for zero only), and the low half.
        zero_with_negative = high_bits.bitwise_and(0x7FFF).sub_(1).bitwise_and_(low_block)
        keep = zero_with_negative.bitwise_right_shift_(15).bitwise_not_()
        bits = out_block.view(torch.int32)
        bits.copy_(high_bits).bitwise_left_shift_(16).add_(keep.bitwise_and_(low_block))


def join(high: Tensor, low: Tensor) -> Tensor:
    """The float32 tensor of a bfloat16 high half and an int16 low half."""
    out = torch.empty_like(high, dtype=torch.float32)
    join_(high.detach(), low, out)
    return out
