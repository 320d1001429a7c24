"""How the Triton kernels read and write moments: as bfloat16, or as 8-bit codes with scales; the twin of quantised.py.

Roots and quotients are the device's approximate ones: a code that is one off is as likely as the noise makes it.
"""

# Type checkers believe that a constexpr parameter takes only constexprs, and that a kernel returns nothing.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from lightning_memkit.optim.fused.kernel_parts import (
    SHARES,
    as_bits,
    as_float,
    load,
    read,
    rounded,
    store,
    write,
)


@triton.jit
def read_moment(
    address, scales, number, start, element, mask,
    SECOND: tl.constexpr, EIGHT: tl.constexpr, FAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Moments in float32."""
    if EIGHT:
        scale = _of_elements(_scales(scales, number, mask, BLOCK), BLOCK)
        if SECOND:
            root = load(address, start, element, mask, tl.uint8, FAST).to(tl.float32) * (1.0 / 255.0)
            root = root * root
            root = root * root
            value = root * root * scale
        else:
            code = load(address, start, element, mask, tl.int8, FAST).to(tl.float32)
            value = code * tl.abs(code) * (scale * (1.0 / 16129.0))
    else:
        value = as_float(read(address, start, element, mask, FAST) << 16)
    return value


@triton.jit
def write_moment(
    address, scales, number, start, element, mask, value, random,
    SECOND: tl.constexpr, EIGHT: tl.constexpr, STOCHASTIC: tl.constexpr, FAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Round and write moments; the lower half of ``random`` is the noise."""
    if EIGHT:
        share = _shared(scales, number, mask, value, BLOCK)
        below = ((random & 0xFFFF).to(tl.float32) + 0.5) * 0.0000152587890625  # 2^-16
        if SECOND:
            root = tl.sqrt(tl.sqrt(tl.sqrt(share))) * 255.0
            code = tl.minimum(tl.maximum((root + below).to(tl.int32), tl.where(share > 0, 1, 0)), 255)
            store(address, start, element, mask, tl.where(share == share, code, 0), tl.uint8, FAST)
        else:
            square = tl.abs(share) * 16129.0
            low = tl.minimum(tl.sqrt(square).to(tl.int32), 126)
            wide = low.to(tl.float32)
            code = low + tl.where(below * (wide + wide + 1.0) < square - wide * wide, 1, 0)
            code = tl.where(share < 0, -code, code)
            store(address, start, element, mask, tl.where(share == share, code, 0), tl.int8, FAST)
    else:
        write(address, start, element, mask, rounded(value, random, STOCHASTIC), FAST)


@triton.jit
def _shared(scales, number, mask, value, BLOCK: tl.constexpr):
    """Each value's share of its block's scale, which is written: the one before if the largest value is near it."""
    most = tl.reshape(as_bits(tl.where(mask, value, 0.0)) & 0x7FFFFFFF, [BLOCK // SHARES, SHARES])
    most = tl.maximum(tl.max(most, axis=1), 0x00800000)  # as integers, so that NaN is the largest
    largest, before = as_float(most), _scales(scales, number, mask, BLOCK)
    up = tl.minimum((tl.minimum(most, 0x7F7F0000) + 0xFFFF) & -65536, 0x7F7F0000)
    scale = tl.where((largest <= before) & (largest > before * 0.875), as_bits(before), up)
    scale = tl.where(most >= 0x7F800000, 0x7FC00000, scale)
    place = number * (BLOCK // SHARES) + tl.arange(0, BLOCK // SHARES)
    at = scales.to(tl.pointer_type(tl.int16)) + place
    tl.store(at, (scale >> 16).to(tl.int16), mask=_there(mask, BLOCK))
    return value * _of_elements(1.0 / as_float(scale), BLOCK)


@triton.jit
def _scales(scales, number, mask, BLOCK: tl.constexpr):
    """The scales of a program's blocks in float32."""
    place = number * (BLOCK // SHARES) + tl.arange(0, BLOCK // SHARES)
    at = scales.to(tl.pointer_type(tl.int16)) + place
    return as_float(tl.load(at, mask=_there(mask, BLOCK), other=0).to(tl.int32) << 16)


@triton.jit
def _there(mask, BLOCK: tl.constexpr):
    """Which of a program's blocks have elements."""
    return tl.max(tl.reshape(mask.to(tl.int32), [BLOCK // SHARES, SHARES]), axis=1) > 0


@triton.jit
def _of_elements(by_block, BLOCK: tl.constexpr):
    """What a block has, for each of its elements."""
    wide = tl.broadcast_to(tl.expand_dims(by_block, 1), [BLOCK // SHARES, SHARES])
    return tl.reshape(wide, [BLOCK])
