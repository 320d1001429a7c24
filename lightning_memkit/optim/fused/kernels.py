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
from triton.language.extra import libdevice

# Columns: addresses of weight, low, gradient, first and second; count; place (see `_place`); index; start.
_COLUMNS = tl.constexpr(9)
_NAN = tl.constexpr(0x7FC0)  # bfloat16's canonical NaN
# The interpreter's cast to bfloat16 truncates, and it lacks libdevice: it rounds with integers and divides
# plainly.
_NATIVE = tl.constexpr(not triton.knobs.runtime.interpret)
_KEYS = ["key_low", "key_high"]  # they change every step: never specialize a kernel on their values


@triton.jit(do_not_specialize=_KEYS)
def adamw(
    table, blocks, key_low, key_high,
    shrink, decay, gain1, keep2, gain2, correction, eps, rate,
    MODE: tl.constexpr, WIDE_GRADIENT: tl.constexpr, STOCHASTIC: tl.constexpr,
    MAXIMIZE: tl.constexpr, DECOUPLED: tl.constexpr, DECAYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """AdamW's step, the twin of `reference._adamw`; `gpu.numbers` gives its scalars."""
    row, start, count, fast = _place(table, blocks, BLOCK)
    if fast:
        _adamw(
            row, start, count, key_low, key_high, shrink, decay, gain1, keep2, gain2, correction, eps, rate,
            MODE, WIDE_GRADIENT, STOCHASTIC, MAXIMIZE, DECOUPLED, DECAYS, True, BLOCK,
        )  # fmt: skip
    else:
        _adamw(
            row, start, count, key_low, key_high, shrink, decay, gain1, keep2, gain2, correction, eps, rate,
            MODE, WIDE_GRADIENT, STOCHASTIC, MAXIMIZE, DECOUPLED, DECAYS, False, BLOCK,
        )  # fmt: skip


@triton.jit
def _adamw(
    row, start, count, key_low, key_high, shrink, decay, gain1, keep2, gain2, correction, eps, rate,
    MODE: tl.constexpr, WIDE_GRADIENT: tl.constexpr, STOCHASTIC: tl.constexpr,
    MAXIMIZE: tl.constexpr, DECOUPLED: tl.constexpr, DECAYS: tl.constexpr, FAST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    high_at, low_at, gradient_at = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    first_at, second_at, index = tl.load(row + 3), tl.load(row + 4), tl.load(row + 7)
    place = start + tl.load(row + 8)  # offset in the whole parameter, of which this may be a shard
    weight = _read_weight(high_at, low_at, start, count, MODE, FAST, BLOCK)
    gradient = _read_gradient(gradient_at, start, count, WIDE_GRADIENT, MAXIMIZE, FAST, BLOCK)
    first = _float(_read(first_at, start, count, FAST, BLOCK) << 16)
    second = _float(_read(second_at, start, count, FAST, BLOCK) << 16)
    tl.debug_barrier()  # issue all loads before waiting for any
    if DECOUPLED:
        weight = weight * shrink
    elif DECAYS:
        gradient = gradient + weight * decay
    first = first + (gradient - first) * gain1
    second = second * keep2 + gradient * gradient * gain2
    weight = weight - rate * _ratio(first, tl.sqrt(second) * correction + eps)
    random = _noise(key_low, key_high, index, 0, place, BLOCK)
    own = _noise(key_low, key_high, index, 1, place, BLOCK) if STOCHASTIC else random
    _write(first_at, start, count, _rounded(first, random, STOCHASTIC), FAST, BLOCK)
    _write(second_at, start, count, _rounded(second, random >> 16, True), FAST, BLOCK)
    _write_weight(high_at, low_at, start, count, weight, own, MODE, FAST, BLOCK)


@triton.jit(do_not_specialize=_KEYS)
def sgd(
    table, blocks, key_low, key_high, decay, momentum, gain, rate,
    MODE: tl.constexpr, WIDE_GRADIENT: tl.constexpr, STOCHASTIC: tl.constexpr, DECAYS: tl.constexpr,
    MAXIMIZE: tl.constexpr, MOMENTUM: tl.constexpr, FIRST_STEP: tl.constexpr, NESTEROV: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """SGD's step, the twin of `reference._sgd`; `gpu.numbers` gives its scalars."""
    row, start, count, fast = _place(table, blocks, BLOCK)
    if fast:
        _sgd(
            row, start, count, key_low, key_high, decay, momentum, gain, rate,
            MODE, WIDE_GRADIENT, STOCHASTIC, DECAYS, MAXIMIZE, MOMENTUM, FIRST_STEP, NESTEROV, True, BLOCK,
        )  # fmt: skip
    else:
        _sgd(
            row, start, count, key_low, key_high, decay, momentum, gain, rate,
            MODE, WIDE_GRADIENT, STOCHASTIC, DECAYS, MAXIMIZE, MOMENTUM, FIRST_STEP, NESTEROV, False, BLOCK,
        )  # fmt: skip


@triton.jit
def _sgd(
    row, start, count, key_low, key_high, decay, momentum, gain, rate,
    MODE: tl.constexpr, WIDE_GRADIENT: tl.constexpr, STOCHASTIC: tl.constexpr, DECAYS: tl.constexpr,
    MAXIMIZE: tl.constexpr, MOMENTUM: tl.constexpr, FIRST_STEP: tl.constexpr, NESTEROV: tl.constexpr,
    FAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    high_at, low_at, gradient_at = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    first_at, index = tl.load(row + 3), tl.load(row + 7)
    place = start + tl.load(row + 8)  # offset in the whole parameter, of which this may be a shard
    weight = _read_weight(high_at, low_at, start, count, MODE, FAST, BLOCK)
    gradient = _read_gradient(gradient_at, start, count, WIDE_GRADIENT, MAXIMIZE, FAST, BLOCK)
    first = gradient
    if MOMENTUM and not FIRST_STEP:
        first = _float(_read(first_at, start, count, FAST, BLOCK) << 16)
    tl.debug_barrier()  # issue all loads before waiting for any
    if DECAYS:
        gradient = gradient + weight * decay
    first = gradient if FIRST_STEP else first * momentum + gradient * gain
    random = _noise(key_low, key_high, index, 0, place, BLOCK)
    if MOMENTUM:
        _write(first_at, start, count, _rounded(first, random >> 16, STOCHASTIC), FAST, BLOCK)
        gradient = gradient + first * momentum if NESTEROV else first
    _write_weight(high_at, low_at, start, count, weight - gradient * rate, random, MODE, FAST, BLOCK)


@triton.jit(do_not_specialize=_KEYS)
def lion(
    table, blocks, key_low, key_high, shrink, keep1, gain1, keep2, gain2, rate,
    MODE: tl.constexpr, WIDE_GRADIENT: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Lion's step, the twin of `reference._lion`; `gpu.numbers` gives its scalars."""
    row, start, count, fast = _place(table, blocks, BLOCK)
    if fast:
        _lion(
            row, start, count, key_low, key_high, shrink, keep1, gain1, keep2, gain2, rate,
            MODE, WIDE_GRADIENT, STOCHASTIC, True, BLOCK,
        )  # fmt: skip
    else:
        _lion(
            row, start, count, key_low, key_high, shrink, keep1, gain1, keep2, gain2, rate,
            MODE, WIDE_GRADIENT, STOCHASTIC, False, BLOCK,
        )  # fmt: skip


@triton.jit
def _lion(
    row, start, count, key_low, key_high, shrink, keep1, gain1, keep2, gain2, rate,
    MODE: tl.constexpr, WIDE_GRADIENT: tl.constexpr, STOCHASTIC: tl.constexpr,
    FAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    high_at, low_at, gradient_at = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    first_at, index = tl.load(row + 3), tl.load(row + 7)
    place = start + tl.load(row + 8)  # offset in the whole parameter, of which this may be a shard
    weight = _read_weight(high_at, low_at, start, count, MODE, FAST, BLOCK)
    gradient = _read_gradient(gradient_at, start, count, WIDE_GRADIENT, False, FAST, BLOCK)
    first = _float(_read(first_at, start, count, FAST, BLOCK) << 16)
    tl.debug_barrier()  # issue all loads before waiting for any
    update = first * keep1 + gradient * gain1
    sign = tl.where(update > 0, 1.0, tl.where(update < 0, -1.0, 0.0))
    first = first * keep2 + gradient * gain2
    random = _noise(key_low, key_high, index, 0, place, BLOCK)
    _write(first_at, start, count, _rounded(first, random >> 16, STOCHASTIC), FAST, BLOCK)
    _write_weight(high_at, low_at, start, count, weight * shrink - sign * rate, random, MODE, FAST, BLOCK)


@triton.jit
def _place(table, blocks, BLOCK: tl.constexpr):
    """The program's row of the table, first element, element count, and whether it moves 16 bytes at a time.

    The place column holds twice the row's first program, plus one if all addresses are aligned to 16 bytes.
    """
    program = tl.program_id(0)
    row = table + tl.load(blocks + program) * _COLUMNS
    count, place = tl.load(row + 5), tl.load(row + 6)
    start = (program - (place >> 1)) * BLOCK
    return row, start, count, ((place & 1) != 0) & (start + BLOCK <= count)


@triton.jit
def _read_weight(high_at, low_at, start, count, MODE: tl.constexpr, FAST: tl.constexpr, BLOCK: tl.constexpr):
    """The float32 weight; the twin of `modes.widen_`."""
    high = _read(high_at, start, count, FAST, BLOCK)
    if MODE == "kahan":
        weight = _float(high << 16)
        # 2^-8: bounds a stale compensation after an outside write, see kahan.py
        limit = tl.abs(weight) * 0.00390625
        rest = _float(_read(low_at, start, count, FAST, BLOCK) << 16)
        weight = weight + tl.minimum(tl.maximum(rest, -limit), limit)
    elif MODE == "split":
        low = _read(low_at, start, count, FAST, BLOCK)
        # Zero with a negative low half: the weight was set from outside, and joining the two would give NaN.
        low = tl.where((((high & 0x7FFF) - 1) & low) < 0, 0, low)
        weight = _float((high << 16) + low)
    elif MODE == "split24":
        low = _load(low_at, start, count, tl.int8, FAST, BLOCK).to(tl.int32)
        low = tl.where((((high & 0x7FFF) - 1) & low) < 0, 0, low)
        weight = _float(((high << 8) + low) << 8)
    else:
        weight = _float(high << 16)
    return weight


@triton.jit
def _write_weight(
    high_at, low_at, start, count, weight, random, MODE: tl.constexpr, FAST: tl.constexpr, BLOCK: tl.constexpr
):
    """Round and write the weight, the twin of `modes.narrow_`; the lower half of ``random`` is the noise."""
    if MODE == "split":
        known, bits = weight == weight, _bits(weight)
        high = tl.where(known, (bits + 0x8000) >> 16, _NAN)
        _write(low_at, start, count, tl.where(known, bits, 0), FAST, BLOCK)
    elif MODE == "split24":
        known, bits = weight == weight, (_bits(weight) + (random & 0xFF).to(tl.int32)) >> 8
        high = tl.where(known, (bits + 0x80) >> 8, _NAN)
        _store(low_at, start, count, tl.where(known, bits, 0), tl.int8, FAST, BLOCK)
    else:
        high = _rounded(weight, random, MODE == "stochastic")
    if MODE == "kahan":
        rest = weight - _float(high << 16)
        rest = tl.where(tl.abs(rest) < float("inf"), rest, 0.0)  # infinity and NaN have no compensation
        _write(low_at, start, count, _jittered(rest, random), FAST, BLOCK)
    _write(high_at, start, count, high, FAST, BLOCK)


@triton.jit
def _read_gradient(
    address, start, count, WIDE: tl.constexpr, MAXIMIZE: tl.constexpr, FAST: tl.constexpr, BLOCK: tl.constexpr
):
    if WIDE:
        value = _load(address, start, count, tl.float32, FAST, BLOCK)
    else:
        value = _float(_read(address, start, count, FAST, BLOCK) << 16)
    return -value if MAXIMIZE else value


@triton.jit
def _read(address, start, count, FAST: tl.constexpr, BLOCK: tl.constexpr):
    """Read 16-bit integers, sign-extended."""
    return _load(address, start, count, tl.int16, FAST, BLOCK).to(tl.int32)


@triton.jit
def _load(address, start, count, DTYPE: tl.constexpr, FAST: tl.constexpr, BLOCK: tl.constexpr):
    base, element = address.to(tl.pointer_type(DTYPE)) + start, tl.arange(0, BLOCK)
    if FAST:
        value = tl.load(tl.multiple_of(base, 16) + element)
    else:
        value = tl.load(base + element, mask=start + element < count, other=0)
    return value


@triton.jit
def _write(address, start, count, bits, FAST: tl.constexpr, BLOCK: tl.constexpr):
    """Write the lower halves of ``bits``."""
    _store(address, start, count, bits, tl.int16, FAST, BLOCK)


@triton.jit
def _store(address, start, count, bits, DTYPE: tl.constexpr, FAST: tl.constexpr, BLOCK: tl.constexpr):
    base, element = address.to(tl.pointer_type(DTYPE)) + start, tl.arange(0, BLOCK)
    if FAST:
        tl.store(tl.multiple_of(base, 16) + element, bits.to(DTYPE))
    else:
        tl.store(base + element, bits.to(DTYPE), mask=start + element < count)


@triton.jit
def _rounded(value, random, STOCHASTIC: tl.constexpr):
    """The bits of a bfloat16: the nearest, or stochastically rounded by the lower half of ``random``."""
    if STOCHASTIC:
        bits = tl.where(value == value, _jittered(value, random), _NAN)
    else:
        bits = _nearest(value)
    return bits


@triton.jit
def _jittered(value, random):
    """Add noise below a bfloat16's last bit and truncate; ``value`` is not NaN."""
    return (_bits(value) + (random & 0xFFFF).to(tl.int32)) >> 16


@triton.jit
def _nearest(value):
    """The bits of the nearest bfloat16, ties to even."""
    if _NATIVE:
        bits = value.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
    else:  # the interpreter's cast truncates
        bits = _bits(value)
        bits = tl.where(value == value, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, _NAN)
    return bits


@triton.jit
def _ratio(value, divisor):
    if _NATIVE:
        value = libdevice.fast_dividef(value, divisor)
    else:
        value = value / divisor
    return value


@triton.jit
def _noise(key_low, key_high, index, LANE: tl.constexpr, start, BLOCK: tl.constexpr):
    """32 random bits an element: a function of the step's key, the parameter's index, the lane and the element."""
    own = _mix(_unsigned(key_low) ^ index.to(tl.uint32))
    own = _mix(own + _unsigned(key_high) + LANE * 0x9E3779B9 + (start >> 32).to(tl.uint32))
    return _mix((start.to(tl.uint32) + tl.arange(0, BLOCK).to(tl.uint32)) ^ own)


@triton.jit
def _mix(x):
    """The 32-bit mixer lowbias32 (Chris Wellons, "Prospecting for Hash Functions", 2018)."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _unsigned(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _bits(value):
    return value.to(tl.int32, bitcast=True)
