"""A float32 weight in 24 bits, as bfloat16 and an int8 low byte: 2 + 1 bytes a parameter, unbiased.

The 24 bits are sign, exponent and 15 bits of the mantissa; the 8 bits below them are rounded stochastically, so that
updates far below the last bit accumulate in the mean, as under float32. Rounded to nearest, updates below 2^-17 of
the weight would all be lost. The bfloat16 is the nearest to the 24 bits, and the byte is their difference, read as a
signed number: ``bits(weight) >> 8 == (bits(high) << 8) + low``, with ties and the largest values as in `split`.

FlashOptim keeps weights as bfloat16 and a byte, too (github.com/databricks/flashoptim); stochastic rounding is Gupta
et al.'s (arXiv:1502.02551).
"""

import torch
from torch import Tensor

from lightning_memkit.optim.blocks import blocks, surely_finite
from lightning_memkit.optim.stochastic_rounding import StochasticRounding

LOW_BYTE = "low_byte"  # its key in an optimizer's state
_HALF = 0x80


def split24_(
    master: Tensor,
    high: Tensor,
    low: Tensor,
    rounding: StochasticRounding | None = None,
    stream: tuple[int, int] = (0, 0),
) -> None:
    """Write float32 ``master``, rounded to 24 bits, into ``high`` and ``low``; NaN becomes the canonical NaN.

    Args:
        master: float32.
        high: bfloat16, of the same shape.
        low: int8, of the same shape.
        rounding: rounds the 24th bit stochastically; None rounds it to nearest, ties away from zero.
        stream: selects the noise: the parameter's index, and the element that ``master`` starts at.
    """
    index, start = stream
    for master_block, high_block, low_block in blocks(master, high, low):
        bits = master_block.view(torch.int32)
        if rounding is None:
            bits = bits.add(_HALF)
        else:
            bits = rounding.noise(master_block, (index, "weight", start)).bitwise_and_(0xFF).add_(bits)
        bits.bitwise_right_shift_(8)
        low_block.copy_(bits)  # keeps the lowest 8 bits, read as a signed number
        high_block.view(torch.int16).copy_(bits.add_(_HALF).bitwise_right_shift_(8))
        if not surely_finite(master_block):
            not_a_number = master_block.isnan()
            high_block.masked_fill_(not_a_number, torch.nan)
            low_block.masked_fill_(not_a_number, 0)
        start += master_block.numel()


def join24_(high: Tensor, low: Tensor, out: Tensor) -> None:
    """Write the float32 weights of bfloat16 and low byte into ``out``.

    A weight that was set to zero from outside may still have a negative low byte, which joined with zero would be the
    pattern of a NaN; as in `split.join_` it is read as 0.
    """
    for high_block, low_block, out_block in blocks(high, low, out):
        high_bits, rest = high_block.view(torch.int16), low_block.short()
        zero_with_negative = high_bits.bitwise_and(0x7FFF).sub_(1).bitwise_and_(rest)
        rest.bitwise_and_(zero_with_negative.bitwise_right_shift_(15).bitwise_not_())
        bits = out_block.view(torch.int32)
        bits.copy_(high_bits).bitwise_left_shift_(8).add_(rest).bitwise_left_shift_(8)
