"""What the Triton kernels of `kernels` are made of: where a program works, memory, rounding, noise.

A place is ``start``, an element, with ``element``, offsets from it, and ``mask``. Where ``FAST``, the offsets are 0,
1, 2 … and all of them are there: 16 bytes move at a time without a mask.
"""

# Type checkers believe that a constexpr parameter takes only constexprs, that a kernel returns nothing and
# that knobs don't exist.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl
from triton.language.extra import libdevice

from lightning_memkit.optim.quantised import BLOCK as _SHARES

# Columns: addresses of weight, low, gradient, first and second; count; place (see `place`); index; start; addresses of
# the scales of first and second; length of a row where these have 8 bits, else 0.
COLUMNS = tl.constexpr(12)
SHARES = tl.constexpr(_SHARES)  # values that share a scale
NAN = tl.constexpr(0x7FC0)  # bfloat16's canonical NaN
# The interpreter's cast to bfloat16 truncates, and it lacks libdevice: it rounds with integers and divides
# plainly.
NATIVE = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def place(table, blocks, BLOCK: tl.constexpr):
    """The program's row of the table, its number among the row's, element count, and whether it is `FAST`.

    The place column holds twice the row's first program, plus one if all addresses, and rows, allow it.
    """
    program = tl.program_id(0)
    row = table + tl.load(blocks + program) * COLUMNS
    count, first = tl.load(row + 5), tl.load(row + 6)
    number = program - (first >> 1)
    return row, number, count, ((first & 1) != 0) & ((number + 1) * BLOCK <= count)


@triton.jit
def elements(row, number, count, EIGHT: tl.constexpr, FAST: tl.constexpr, BLOCK: tl.constexpr):
    """The elements of a program: its start, offsets from it, and which of them are there.

    Where moments have 8 bits, a program owns whole blocks of rows, whose ends may be missing.
    """
    element = tl.arange(0, BLOCK)
    start = number * BLOCK
    if EIGHT and not FAST:
        length = tl.load(row + 11)
        in_row = (length + SHARES - 1) // SHARES
        block = number * (BLOCK // SHARES) + element // SHARES
        column = (block % in_row) * SHARES + element % SHARES
        start = number * 0
        element = (block // in_row) * length + column
        mask = (column < length) & (element < count)
    else:
        mask = start + element < count
    return start, element, mask


@triton.jit
def read_gradient(
    address, start, element, mask, WIDE: tl.constexpr, MAXIMIZE: tl.constexpr, FAST: tl.constexpr
):
    """A gradient in float32, turned where the step climbs."""
    if WIDE:
        value = load(address, start, element, mask, tl.float32, FAST)
    else:
        value = as_float(read(address, start, element, mask, FAST) << 16)
    return -value if MAXIMIZE else value


@triton.jit
def read(address, start, element, mask, FAST: tl.constexpr):
    """Read 16-bit integers, sign-extended."""
    return load(address, start, element, mask, tl.int16, FAST).to(tl.int32)


@triton.jit
def load(address, start, element, mask, DTYPE: tl.constexpr, FAST: tl.constexpr):
    """Read the elements; 0 for those that are not there."""
    base = address.to(tl.pointer_type(DTYPE)) + start
    if FAST:
        value = tl.load(tl.multiple_of(base, 16) + element)
    else:
        value = tl.load(base + element, mask=mask, other=0)
    return value


@triton.jit
def write(address, start, element, mask, bits, FAST: tl.constexpr):
    """Write the lower halves of ``bits``."""
    store(address, start, element, mask, bits, tl.int16, FAST)


@triton.jit
def store(address, start, element, mask, bits, DTYPE: tl.constexpr, FAST: tl.constexpr):
    """Write the lowest bits of the elements."""
    base = address.to(tl.pointer_type(DTYPE)) + start
    if FAST:
        tl.store(tl.multiple_of(base, 16) + element, bits.to(DTYPE))
    else:
        tl.store(base + element, bits.to(DTYPE), mask=mask)


@triton.jit
def rounded(value, random, STOCHASTIC: tl.constexpr):
    """The bits of a bfloat16: the nearest, or stochastically rounded by the lower half of ``random``."""
    if STOCHASTIC:
        bits = tl.where(value == value, jittered(value, random), NAN)
    else:
        bits = nearest(value)
    return bits


@triton.jit
def jittered(value, random):
    """Add noise below a bfloat16's last bit and truncate; ``value`` is not NaN."""
    return (as_bits(value) + (random & 0xFFFF).to(tl.int32)) >> 16


@triton.jit
def nearest(value):
    """The bits of the nearest bfloat16, ties to even."""
    if NATIVE:
        bits = value.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
    else:  # the interpreter's cast truncates
        bits = as_bits(value)
        bits = tl.where(value == value, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, NAN)
    return bits


@triton.jit
def ratio(value, divisor):
    """A quotient, within 2 in the last place of float32 on a device."""
    if NATIVE:
        value = libdevice.fast_dividef(value, divisor)
    else:
        value = value / divisor
    return value


@triton.jit
def noise(key_low, key_high, index, LANE: tl.constexpr, start, element):
    """32 random bits an element: a function of the step's key, the parameter's index, the lane and the element."""
    own = mix(as_unsigned(key_low) ^ index.to(tl.uint32))
    own = mix(own + as_unsigned(key_high) + LANE * 0x9E3779B9 + (start >> 32).to(tl.uint32))
    return mix((start.to(tl.uint32) + element.to(tl.uint32)) ^ own)


@triton.jit
def mix(x):
    """The 32-bit mixer lowbias32 (Chris Wellons, "Prospecting for Hash Functions", 2018)."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def as_unsigned(x):
    """The same bits as uint32."""
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def as_float(bits):
    """The float32 of 32 bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def as_bits(value):
    """The bits of a float32, as int32."""
    return value.to(tl.int32, bitcast=True)
