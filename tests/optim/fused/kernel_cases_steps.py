"""What a step of the kernels writes, beside plain torch and float64; see kernel_runs.py."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from lightning_memkit.optim.fused import gpu, reference
from lightning_memkit.optim.fused.operands import AdamW, Lion, first_is_stochastic
from lightning_memkit.optim.quantised import BLOCK
from lightning_memkit.optim.split import join, split
from tests.optim.fused.kernel_runs import ADD, DEVICE, noise, numpy_may_warn, on_device, rounded_with, step
from tests.optim.fused.rules import (
    MODES,
    RULES,
    copied,
    in_8_bits,
    master,
    moment,
    operand,
    rounding,
    truth,
)

pytestmark = numpy_may_warn

# What a kernel's weight may err more than plain torch's: last bits of float32, after a mode's rounding.
TOLERANCE = {"kahan": 2**-16, "split": 2**-21, "split24": 2**-15, "stochastic": 2**-7, "none": 2**-21}

STILL = Lion(learning_rate=0.0, beta1=0.9, beta2=0.9, weight_decay=0.0)


def error(stepped: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((stepped - expected).abs() / (expected.abs() + 1e-3)).max())


@pytest.mark.parametrize("gradient_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", RULES)
def test_a_kernel_errs_as_little_as_plain_torch(name, mode, gradient_dtype):
    rule = RULES[name]
    start = operand(rule, mode, 2 * gpu.BLOCK + 7, gradient_dtype=gradient_dtype)
    expected, *moments = truth(rule, start)
    ours, plain = copied(start), copied(start)
    step(rule, mode, [ours], rounding())
    reference.step(rule, mode, [plain], rounding())
    assert error(master(ours), expected) <= error(master(plain), expected) + TOLERANCE[mode]
    if mode == "kahan":
        lane = int(isinstance(rule, AdamW) and first_is_stochastic(rule))  # both moments take all of a lane
        bits = noise(rounding(), 0, lane, len(expected)) & 0xFFFF
        assert ours.low is not None
        wanted = rounded_with((expected - ours.weight.double()).float(), bits)
        # A float32 result that is one bit off is a rest that is off by about 2^-8 of its own distance.
        assert float((ours.low != wanted).double().mean()) < 0.05
    for which, exact in zip(("first", "second"), moments, strict=True):
        if exact is None:
            continue
        stored = getattr(ours, which)
        stochastic = which == "second" or first_is_stochastic(rule)
        if stochastic:  # between both neighbours, whichever the noise says
            bits = noise(rounding(), 0, 0, len(stored))
            shared = isinstance(rule, AdamW) and which == "first"
            wanted = rounded_with(exact.float(), bits & 0xFFFF if shared else bits >> 16)
        else:
            wanted = exact.float().bfloat16()
        # A float32 result that is one bit off may round to the other side.
        assert float((stored != wanted).double().mean()) < 2e-3
        assert float(((stored.double() - exact).abs() / (exact.abs() + 1e-30)).max()) <= 2**-7


@pytest.mark.parametrize(("rows", "length"), [(16, 256), (7, 128), (5, 300), (40, 32)])
@pytest.mark.parametrize("mode", ["split24", "kahan", "none"])
@pytest.mark.parametrize("name", RULES)
def test_a_kernel_over_8_bit_moments_does_what_plain_torch_does(name, mode, rows, length):
    """Its noise is another one: scales are equal, and codes at most one apart."""
    rule = RULES[name]
    start = in_8_bits(rule, mode, rows, length)
    expected, *moments = truth(rule, start)
    ours, plain = copied(start), copied(start)
    step(rule, mode, [ours], rounding())
    reference.step(rule, mode, [plain], rounding())
    assert error(master(ours), expected) <= error(master(plain), expected) + TOLERANCE[mode]
    for which, exact in zip(("first", "second"), moments, strict=True):
        if exact is None:
            continue
        of_ours, of_plain = (getattr(one, f"{which}_scales") for one in (ours, plain))
        # A largest value that is one bit off may have the next scale.
        assert (of_ours != of_plain).double().mean() < 0.02
        same = (of_ours == of_plain).repeat_interleave(BLOCK, 1)[:, :length].flatten()
        codes = [getattr(one, which).int() for one in (ours, plain)]
        assert (codes[0] - codes[1])[same].abs().max() <= 1
        assert 0.02 < (codes[0] != codes[1]).double().mean() < 0.6
        errors = []
        for one in (ours, plain):
            wide = moment(rule, one, which)
            assert wide is not None
            errors.append(((wide - exact).abs() / (exact.abs() + 1e-30)).clamp(max=1).mean())
        assert errors[0] < 1.3 * errors[1]


def test_8_bit_operands_of_many_shapes_in_one_launch():
    rule = RULES["adamw"]
    shapes = [(3, 128), (16, 128), (1, 2048), (5, 33), (9, 200)]
    starts = [in_8_bits(rule, "split24", *shape, index=place) for place, shape in enumerate(shapes)]
    starts.append(operand(rule, "split24", 77, index=5))  # a bias among them
    together = [on_device(copied(start)) for start in starts]
    gpu.step(rule, "split24", together, rounding())
    for start, ours in zip(starts, together, strict=True):
        alone = copied(start)
        step(rule, "split24", [alone], rounding())
        for name in ("weight", "low", "first", "second", "first_scales", "second_scales"):
            if getattr(alone, name) is not None:
                assert torch.equal(getattr(ours, name).cpu(), getattr(alone, name)), name


def test_a_block_with_a_broken_gradient_is_nan_and_no_other():
    rule = RULES["adamw"]
    start = in_8_bits(rule, "split24", 4, 256)
    start.gradient[300] = torch.inf
    step(rule, "split24", [start], rounding())
    for name in ("first", "second"):
        wide = moment(rule, start, name)
        assert wide is not None
        assert wide[256:384].isnan().all()
        assert wide[:256].isfinite().all()
        assert wide[384:].isfinite().all()


SPECIAL = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, -1e-45, 3.4028e38, -3.3962e38, 3.3895e38, 1.0]


@pytest.mark.parametrize("mode", MODES)
def test_a_still_step_keeps_every_kind_of_value(mode):
    generator = torch.Generator().manual_seed(3)
    patterns = torch.randint(-(2**31), 2**31, (5000,), generator=generator).to(torch.int32)
    values = torch.cat([torch.tensor(SPECIAL), patterns.view(torch.float32)])
    start = operand(STILL, mode, len(values))
    start.gradient.zero_()
    assert start.first is not None
    start.first.zero_()
    reference.narrow_(mode, values, start.weight, start.low, rounding(), (0, 0))
    ours = copied(start)
    step(STILL, mode, [ours], rounding(2))
    if mode == "split":
        high, low = split(values)
        assert ours.low is not None
        assert torch.equal(ours.weight.view(torch.int16), high.view(torch.int16))
        assert torch.equal(ours.low, low)
        known = ~values.isnan()
        assert torch.equal(
            join(ours.weight, ours.low)[known].view(torch.int32), values[known].view(torch.int32)
        )
        return
    known = ~start.weight.isnan()
    assert torch.equal(ours.weight.isnan(), ~known)
    finite = start.weight.isfinite()
    kept = finite & (start.weight.abs() > 1e-30)  # below, 2^-8 of a weight, Kahan's largest rest, loses bits
    assert torch.equal(master(ours)[kept], master(start)[kept])  # the halves of a sum may be others
    assert torch.equal(ours.weight[known & ~finite], start.weight[known & ~finite])
    if mode == "kahan":
        plain = copied(start)
        reference.step(STILL, mode, [plain], rounding(2))
        assert torch.equal(ours.weight[known], plain.weight[known])
        assert ours.low is not None
        assert plain.low is not None
        assert torch.equal(ours.low[kept], plain.low[kept])


@pytest.mark.parametrize("low", [-32768, -1, 0, 5, 32767])
def test_a_zeroed_weight_with_a_stale_low_half_reads_as_join_reads_it(low):
    start = operand(STILL, "split", 4)
    start.weight.copy_(torch.tensor([0.0, -0.0, 1.0, -1e-40]))
    assert start.low is not None
    start.low.fill_(low)
    start.gradient.zero_()
    expected = join(start.weight, start.low)
    step(STILL, "split", [start], rounding())
    assert torch.equal(join(start.weight, start.low), expected)
    assert not start.weight.isnan().any()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pattern", [0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000])
def test_no_payload_of_a_nan_turns_it_into_a_number(pattern, mode):
    """A GPU's own NaN is 0x7FFFFFFF: anything added to it carries into the sign."""
    start = operand(ADD, mode, 200, gradient_dtype=torch.float32)
    start.gradient.copy_(torch.full((200,), pattern, dtype=torch.int32).view(torch.float32))
    step(ADD, mode, [start], rounding())
    assert start.weight.isnan().all()
    if start.low is not None:
        assert not start.low.any()


@pytest.mark.parametrize("mode", ["kahan", "split", "split24", "none"])
def test_ties_and_values_beyond_the_largest_round_as_plain_torch_rounds_them(mode):
    start = operand(ADD, mode, 6, gradient_dtype=torch.float32)
    start.weight.copy_(torch.tensor([1.0, 1.0, -1.0, 3.3895e38, -3.3895e38, torch.inf]))
    if start.low is not None:
        start.low.zero_()
    start.gradient.copy_(torch.tensor([2**-8, 3 * 2**-8, -(2**-8), 1.2e36, -0.4e36, 1.0]))
    ours, plain = copied(start), copied(start)
    step(ADD, mode, [ours], rounding())
    reference.step(ADD, mode, [plain], rounding())
    assert ours.weight[3] == ours.weight[5] == torch.inf
    assert ours.weight[4].isfinite()
    assert ours.weight[0] == (1 + 2**-7 if mode in ("split", "split24") else 1)
    for name in ("weight", "low"):
        if getattr(ours, name) is not None:
            assert torch.equal(getattr(ours, name), getattr(plain, name))


@pytest.mark.parametrize("rule", [RULES["adamw"], RULES["sgd"], RULES["lion"]], ids=["adamw", "sgd", "lion"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_broken_gradient_breaks_its_element_alone(rule, bad):
    start = operand(rule, "split", 300)
    whole = copied(start)
    step(rule, "split", [whole], rounding())
    gradient = start.gradient.clone()
    start.gradient[17] = bad
    broken = copied(start)
    step(rule, "split", [broken], rounding())
    start.gradient.copy_(gradient)
    others = torch.arange(300) != 17
    assert torch.equal(broken.weight[others], whole.weight[others])
    if not isinstance(rule, Lion):
        assert not broken.weight[17].isfinite()
    assert broken.first is not None
    assert not broken.first[17].isfinite()


def test_one_launch_steps_many_operands_and_nothing_beside_them():
    rule = RULES["adamw"]
    counts = [1, 0, 7, 1000, gpu.BLOCK, gpu.BLOCK + 1, 3 * gpu.BLOCK, 5]
    starts = [operand(rule, "kahan", count, index=place) for place, count in enumerate(counts)]
    storage = torch.full((sum(counts) + 64 * len(counts),), 7.0, dtype=torch.bfloat16, device=DEVICE)
    used, together = torch.zeros(len(storage), dtype=torch.bool), []
    end = 3  # weights lie in one buffer, most of them not on 16 bytes
    for place, start in enumerate(starts):
        view = storage[end : end + counts[place]]
        view.copy_(start.weight)
        used[end : end + counts[place]] = True
        together.append(replace(on_device(copied(start)), weight=view))
        end += counts[place] + (5, 8)[place % 2]
    gpu.step(rule, "kahan", together, rounding())
    assert (storage.cpu()[~used] == 7).all()
    for start, ours in zip(starts, together, strict=True):
        alone = copied(start)
        step(rule, "kahan", [alone], rounding())
        for name in ("weight", "low", "first", "second"):
            assert torch.equal(getattr(ours, name).cpu(), getattr(alone, name))


def test_sixteen_bytes_move_at_a_time_only_where_all_tensors_allow_it():
    rule, stream = RULES["lion"], rounding()
    odd = on_device(operand(rule, "split", gpu.BLOCK + 9, index=1))
    assert odd.first is not None
    odd = replace(
        odd, first=torch.empty(gpu.BLOCK + 10, dtype=torch.bfloat16, device=DEVICE)[1:].copy_(odd.first)
    )
    operands = [
        on_device(operand(rule, "split", 3 * gpu.BLOCK)),
        odd,
        on_device(operand(rule, "split", 8, index=2)),
    ]
    gpu.step(rule, "split", operands, stream)
    (table,) = gpu._tables[stream].values()
    # Twice the first program, and one where every address is a multiple of 16.
    assert table.rows[:, 6].tolist() == [2 * 0 + 1, 2 * 3, 2 * 5 + 1]
    assert table.blocks.tolist() == [0, 0, 0, 1, 1, 2]


def test_gradients_of_both_dtypes_in_one_step():
    rule = RULES["lion"]
    starts = [
        operand(rule, "split", 40, index=place, gradient_dtype=dtype)
        for place, dtype in enumerate([torch.bfloat16, torch.float32, torch.bfloat16])
    ]
    together = [copied(start) for start in starts]
    step(rule, "split", together, rounding())
    for start, ours in zip(starts, together, strict=True):
        assert error(master(ours), truth(rule, start)[0]) < 1e-6


def test_a_table_follows_tensors_that_move_and_keeps_none_of_them():
    rule, stream = RULES["adamw"], rounding()
    first = on_device(operand(rule, "split", 50))
    gpu.step(rule, "split", [first], stream)
    table = next(iter(gpu._tables[stream].values()))
    rows = table.rows
    gpu.step(rule, "split", [first], stream)
    assert table.rows is rows  # nothing moved, nothing written
    moved, untouched = copied(first), first.weight.clone()
    gpu.step(rule, "split", [moved], stream)
    assert table.rows is not rows
    assert len(gpu._tables[stream]) == 1
    assert torch.equal(first.weight, untouched)
    assert not torch.equal(moved.weight, untouched)
    weight, tables = weakref.ref(first.weight), weakref.ref(table)
    del first, moved, table, stream
    gc.collect()
    assert weight() is None
    assert tables() is None  # they go with the optimizer's stream of noise
