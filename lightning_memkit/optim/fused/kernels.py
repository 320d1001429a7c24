"""The fused steps as Triton kernels: each bit of a parameter is read once and written once.

One launch steps many parameters. A program owns ``BLOCK`` neighbouring elements of one of them: `blocks` names the
program's row of `table`, and a row holds addresses as integers (`gpu.py` writes both). Full blocks whose tensors are
aligned to 16 bytes move 16 bytes at a time without a mask; the others move element by element.

bfloat16 is read and written as int16. On an H200, whose memory feeds 240 billion elements a second, a step with more
than about 100 instructions an element would be bound by instructions; AdamW with kahan takes 58 on sm_90. Hence the
device's own rounding and its approximate root and quotient (2 in the last place of float32) instead of exact ones.

Multiplications and additions are not fused, so that Kahan's difference is exact and every device agrees.
"""

# Type checkers believe that a constexpr parameter takes only constexprs, that a kernel returns nothing and
# that knobs don't exist.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from lightning_memkit.optim.fused.kernel_moments import read_moment, write_moment
from lightning_memkit.optim.fused.kernel_parts import (
    NAN,
    as_bits,
    as_float,
    elements,
    jittered,
    load,
    noise,
    place,
    ratio,
    read,
    read_gradient,
    rounded,
    store,
    write,
)

_KEYS = ["key_low", "key_high"]  # they change every step: never specialize a kernel on their values


@triton.jit(do_not_specialize=_KEYS)
def adamw(
    table, blocks, key_low, key_high,
    shrink, decay, gain1, keep2, gain2, correction, eps, rate,
    MODE: tl.constexpr, WIDE_GRADIENT: tl.constexpr, EIGHT: tl.constexpr, STOCHASTIC: tl.constexpr,
    MAXIMIZE: tl.constexpr, DECOUPLED: tl.constexpr, DECAYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """AdamW's step, the twin of `reference._adamw`; `gpu.numbers` gives its scalars."""
    row, number, count, fast = place(table, blocks, BLOCK)
    if fast:
        _adamw(
            row, number, count, key_low, key_high, shrink, decay, gain1, keep2, gain2, correction, eps, rate,
            MODE, WIDE_GRADIENT, EIGHT, STOCHASTIC, MAXIMIZE, DECOUPLED, DECAYS, True, BLOCK,
        )  # fmt: skip
    else:
        _adamw(
            row, number, count, key_low, key_high, shrink, decay, gain1, keep2, gain2, correction, eps, rate,
            MODE, WIDE_GRADIENT, EIGHT, STOCHASTIC, MAXIMIZE, DECOUPLED, DECAYS, False, BLOCK,
        )  # fmt: skip


@triton.jit
def _adamw(
    row, number, count, key_low, key_high, shrink, decay, gain1, keep2, gain2, correction, eps, rate,
    MODE: tl.constexpr, WIDE_GRADIENT: tl.constexpr, EIGHT: tl.constexpr, STOCHASTIC: tl.constexpr,
    MAXIMIZE: tl.constexpr, DECOUPLED: tl.constexpr, DECAYS: tl.constexpr, FAST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    high_at, low_at, gradient_at = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    first_at, second_at, index = tl.load(row + 3), tl.load(row + 4), tl.load(row + 7)
    start, element, mask = elements(row, number, count, EIGHT, FAST, BLOCK)
    at = start + tl.load(row + 8)  # offset in the whole parameter, of which this may be a shard
    first_scales, second_scales = tl.load(row + 9), tl.load(row + 10)
    weight = _read_weight(high_at, low_at, start, element, mask, MODE, FAST)
    gradient = read_gradient(gradient_at, start, element, mask, WIDE_GRADIENT, MAXIMIZE, FAST)
    first = read_moment(first_at, first_scales, number, start, element, mask, False, EIGHT, FAST, BLOCK)
    second = read_moment(second_at, second_scales, number, start, element, mask, True, EIGHT, FAST, BLOCK)
    tl.debug_barrier()  # issue all loads before waiting for any
    if DECOUPLED:
        weight = weight * shrink
    elif DECAYS:
        gradient = gradient + weight * decay
    first = first + (gradient - first) * gain1
    second = second * keep2 + gradient * gradient * gain2
    weight = weight - rate * ratio(first, tl.sqrt(second) * correction + eps)
    random = noise(key_low, key_high, index, 0, at, element)
    own = noise(key_low, key_high, index, 1, at, element) if STOCHASTIC else random
    write_moment(
        first_at, first_scales, number, start, element, mask, first, random,
        False, EIGHT, STOCHASTIC, FAST, BLOCK,
    )  # fmt: skip
    write_moment(
        second_at, second_scales, number, start, element, mask, second, random >> 16,
        True, EIGHT, True, FAST, BLOCK,
    )  # fmt: skip
    _write_weight(high_at, low_at, start, element, mask, weight, own, MODE, FAST)


@triton.jit(do_not_specialize=_KEYS)
def sgd(
    table, blocks, key_low, key_high, decay, momentum, gain, rate,
    MODE: tl.constexpr, WIDE_GRADIENT: tl.constexpr, EIGHT: tl.constexpr, STOCHASTIC: tl.constexpr,
    DECAYS: tl.constexpr, MAXIMIZE: tl.constexpr, MOMENTUM: tl.constexpr,
    FIRST_STEP: tl.constexpr, NESTEROV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """SGD's step, the twin of `reference._sgd`; `gpu.numbers` gives its scalars."""
    row, number, count, fast = place(table, blocks, BLOCK)
    if fast:
        _sgd(
            row, number, count, key_low, key_high, decay, momentum, gain, rate,
            MODE, WIDE_GRADIENT, EIGHT, STOCHASTIC, DECAYS, MAXIMIZE, MOMENTUM, FIRST_STEP, NESTEROV, True, BLOCK,
        )  # fmt: skip
    else:
        _sgd(
            row, number, count, key_low, key_high, decay, momentum, gain, rate,
            MODE, WIDE_GRADIENT, EIGHT, STOCHASTIC, DECAYS, MAXIMIZE, MOMENTUM, FIRST_STEP, NESTEROV, False, BLOCK,
        )  # fmt: skip


@triton.jit
def _sgd(
    row, number, count, key_low, key_high, decay, momentum, gain, rate,
    MODE: tl.constexpr, WIDE_GRADIENT: tl.constexpr, EIGHT: tl.constexpr, STOCHASTIC: tl.constexpr,
    DECAYS: tl.constexpr, MAXIMIZE: tl.constexpr, MOMENTUM: tl.constexpr,
    FIRST_STEP: tl.constexpr, NESTEROV: tl.constexpr, FAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    high_at, low_at, gradient_at = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    first_at, index = tl.load(row + 3), tl.load(row + 7)
    start, element, mask = elements(row, number, count, EIGHT, FAST, BLOCK)
    at = start + tl.load(row + 8)  # offset in the whole parameter, of which this may be a shard
    first_scales = tl.load(row + 9)
    weight = _read_weight(high_at, low_at, start, element, mask, MODE, FAST)
    gradient = read_gradient(gradient_at, start, element, mask, WIDE_GRADIENT, MAXIMIZE, FAST)
    first = gradient
    if MOMENTUM and not FIRST_STEP:
        first = read_moment(first_at, first_scales, number, start, element, mask, False, EIGHT, FAST, BLOCK)
    tl.debug_barrier()  # issue all loads before waiting for any
    if DECAYS:
        gradient = gradient + weight * decay
    first = gradient if FIRST_STEP else first * momentum + gradient * gain
    random = noise(key_low, key_high, index, 0, at, element)
    if MOMENTUM:
        write_moment(
            first_at, first_scales, number, start, element, mask, first, random >> 16,
            False, EIGHT, STOCHASTIC, FAST, BLOCK,
        )  # fmt: skip
        gradient = gradient + first * momentum if NESTEROV else first
    _write_weight(high_at, low_at, start, element, mask, weight - gradient * rate, random, MODE, FAST)


@triton.jit(do_not_specialize=_KEYS)
def lion(
    table, blocks, key_low, key_high, shrink, keep1, gain1, keep2, gain2, rate,
    MODE: tl.constexpr, WIDE_GRADIENT: tl.constexpr, EIGHT: tl.constexpr, STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Lion's step, the twin of `reference._lion`; `gpu.numbers` gives its scalars."""
    row, number, count, fast = place(table, blocks, BLOCK)
    if fast:
        _lion(
            row, number, count, key_low, key_high, shrink, keep1, gain1, keep2, gain2, rate,
            MODE, WIDE_GRADIENT, EIGHT, STOCHASTIC, True, BLOCK,
        )  # fmt: skip
    else:
        _lion(
            row, number, count, key_low, key_high, shrink, keep1, gain1, keep2, gain2, rate,
            MODE, WIDE_GRADIENT, EIGHT, STOCHASTIC, False, BLOCK,
        )  # fmt: skip


@triton.jit
def _lion(
    row, number, count, key_low, key_high, shrink, keep1, gain1, keep2, gain2, rate,
    MODE: tl.constexpr, WIDE_GRADIENT: tl.constexpr, EIGHT: tl.constexpr, STOCHASTIC: tl.constexpr,
    FAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    high_at, low_at, gradient_at = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    first_at, index = tl.load(row + 3), tl.load(row + 7)
    start, element, mask = elements(row, number, count, EIGHT, FAST, BLOCK)
    at = start + tl.load(row + 8)  # offset in the whole parameter, of which this may be a shard
    first_scales = tl.load(row + 9)
    weight = _read_weight(high_at, low_at, start, element, mask, MODE, FAST)
    gradient = read_gradient(gradient_at, start, element, mask, WIDE_GRADIENT, False, FAST)
    first = read_moment(first_at, first_scales, number, start, element, mask, False, EIGHT, FAST, BLOCK)
    tl.debug_barrier()  # issue all loads before waiting for any
    update = first * keep1 + gradient * gain1
    sign = tl.where(update > 0, 1.0, tl.where(update < 0, -1.0, 0.0))
    first = first * keep2 + gradient * gain2
    random = noise(key_low, key_high, index, 0, at, element)
    write_moment(
        first_at, first_scales, number, start, element, mask, first, random >> 16,
        False, EIGHT, STOCHASTIC, FAST, BLOCK,
    )  # fmt: skip
    _write_weight(high_at, low_at, start, element, mask, weight * shrink - sign * rate, random, MODE, FAST)


@triton.jit
def _read_weight(high_at, low_at, start, element, mask, MODE: tl.constexpr, FAST: tl.constexpr):
    """The float32 weight; the twin of `modes.widen_`."""
    high = read(high_at, start, element, mask, FAST)
    if MODE == "kahan":
        weight = as_float(high << 16)
        # 2^-8: bounds a stale compensation after an outside write, see kahan.py
        limit = tl.abs(weight) * 0.00390625
        rest = as_float(read(low_at, start, element, mask, FAST) << 16)
        weight = weight + tl.minimum(tl.maximum(rest, -limit), limit)
    elif MODE == "split":
        low = read(low_at, start, element, mask, FAST)
        # Zero with a negative low half: the weight was set from outside, and joining the two would give NaN.
        low = tl.where((((high & 0x7FFF) - 1) & low) < 0, 0, low)
        weight = as_float((high << 16) + low)
    elif MODE == "split24":
        low = load(low_at, start, element, mask, tl.int8, FAST).to(tl.int32)
        low = tl.where((((high & 0x7FFF) - 1) & low) < 0, 0, low)
        weight = as_float(((high << 8) + low) << 8)
    else:
        weight = as_float(high << 16)
    return weight


@triton.jit
def _write_weight(
    high_at, low_at, start, element, mask, weight, random, MODE: tl.constexpr, FAST: tl.constexpr
):
    """Round and write the weight, the twin of `modes.narrow_`; the lower half of ``random`` is the noise."""
    if MODE == "split":
        known, bits = weight == weight, as_bits(weight)
        high = tl.where(known, (bits + 0x8000) >> 16, NAN)
        write(low_at, start, element, mask, tl.where(known, bits, 0), FAST)
    elif MODE == "split24":
        known, bits = weight == weight, (as_bits(weight) + (random & 0xFF).to(tl.int32)) >> 8
        high = tl.where(known, (bits + 0x80) >> 8, NAN)
        store(low_at, start, element, mask, tl.where(known, bits, 0), tl.int8, FAST)
    else:
        high = rounded(weight, random, MODE == "stochastic")
    if MODE == "kahan":
        rest = weight - as_float(high << 16)
        rest = tl.where(tl.abs(rest) < float("inf"), rest, 0.0)  # infinity and NaN have no compensation
        write(low_at, start, element, mask, jittered(rest, random), FAST)
    write(high_at, start, element, mask, high, FAST)
