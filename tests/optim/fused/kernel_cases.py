"""What the Triton kernels compute: on CUDA, or on the CPU by Triton's interpreter, which has to be chosen by the
environment before triton is imported. `test_gpu.py` therefore runs this file in a process of its own.
"""

import gc
import os
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lightning_memkit.optim.fused import gpu, reference
from lightning_memkit.optim.fused.operands import SGD, AdamW, Lion, Operand, Rule, first_is_stochastic
from lightning_memkit.optim.split import join, split
from lightning_memkit.optim.stochastic_rounding import StochasticRounding
from tests.optim.fused.rules import MODES, RULES, copied, master, operand, rounding, truth

# What a kernel's weight may err more than plain torch's: last bits of float32, after a mode's rounding.
TOLERANCE = {"kahan": 2**-16, "split": 2**-21, "stochastic": 2**-7, "none": 2**-21}

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
TENSORS = ("weight", "low", "gradient", "first", "second")

# numpy, which the interpreter computes with, warns where float32 overflows or meets a NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

STILL = Lion(learning_rate=0.0, beta1=0.9, beta2=0.9, weight_decay=0.0)
ADD = SGD(learning_rate=-1.0, momentum=0, dampening=0, weight_decay=0, nesterov=False, first_step=False)


def on_device(source: Operand) -> Operand:
    moved: dict[str, Any] = {name: getattr(source, name) for name in TENSORS}
    return replace(source, **{name: None if t is None else t.to(DEVICE) for name, t in moved.items()})


def step(rule: Rule, mode: Any, operands: Sequence[Operand], stream: StochasticRounding) -> None:
    """`gpu.step` on the device, of operands on the CPU."""
    there = [on_device(source) for source in operands]
    gpu.step(rule, mode, there, stream)
    for source, moved in zip(operands, there, strict=True):
        for name in TENSORS:
            if getattr(source, name) is not None:
                getattr(source, name).copy_(getattr(moved, name))


def mixed(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def noise(stream: StochasticRounding, index: int, lane: int, count: int) -> torch.Tensor:
    """The kernels' 32 bits an element, as int64."""
    key = stream.stream(0, "kernels")
    own = mixed(np.array([(key & 0xFFFFFFFF) ^ index], dtype=np.uint32))
    own = mixed(own + np.uint32((key >> 32) + lane * 0x9E3779B9 & 0xFFFFFFFF))
    return torch.from_numpy(mixed(np.arange(count, dtype=np.uint32) ^ own).astype(np.int64))


def rounded_with(value: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """float32 to bfloat16, up where 16 bits of noise carry."""
    moved = value.view(torch.int32).long() + bits
    return (moved >> 16).to(torch.int16).view(torch.bfloat16)


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
        lane = int(
            isinstance(rule, AdamW) and first_is_stochastic(rule)
        )  # where the moments take all of the noise
        bits = noise(rounding(), 0, lane, len(expected)) & 0xFFFF
        assert ours.low is not None
        wanted = rounded_with((expected - ours.weight.double()).float(), bits)
        assert (
            float((ours.low != wanted).double().mean()) < 0.05
        )  # float32's last bits are the rest's middle ones
    for moment, exact in zip(("first", "second"), moments, strict=True):
        if exact is None:
            continue
        stored = getattr(ours, moment)
        stochastic = moment == "second" or first_is_stochastic(rule)
        if stochastic:  # between both neighbours, whichever the noise says
            bits = noise(rounding(), 0, 0, len(stored))
            shared = isinstance(rule, AdamW) and moment == "first"
            wanted = rounded_with(exact.float(), bits & 0xFFFF if shared else bits >> 16)
        else:
            wanted = exact.float().bfloat16()
        # A float32 result that is one bit off may round to the other side.
        assert float((stored != wanted).double().mean()) < 2e-3
        assert float(((stored.double() - exact).abs() / (exact.abs() + 1e-30)).max()) <= 2**-7


def test_stochastic_weights_take_noise_of_their_own():
    start = operand(ADD, "stochastic", 3000, index=4)
    start.gradient.fill_(2**-10)
    exact = start.weight.float() + 2**-10
    step(ADD, "stochastic", [start], rounding())
    assert torch.equal(start.weight, rounded_with(exact, noise(rounding(), 4, 0, 3000) & 0xFFFF))


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
    assert torch.equal(master(ours)[finite], master(start)[finite])  # the halves of a sum may be others
    assert torch.equal(ours.weight[known & ~finite], start.weight[known & ~finite])
    if mode == "kahan":
        plain = copied(start)
        reference.step(STILL, mode, [plain], rounding(2))
        assert torch.equal(ours.weight[known], plain.weight[known])
        assert ours.low is not None
        assert plain.low is not None
        assert torch.equal(ours.low, plain.low)


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


@pytest.mark.parametrize("mode", ["kahan", "split", "none"])
def test_ties_and_values_beyond_the_largest_round_as_plain_torch_rounds_them(mode):
    start = operand(ADD, mode, 5, gradient_dtype=torch.float32)
    start.weight.copy_(torch.tensor([1.0, 1.0, -1.0, 3.3895e38, -3.3895e38]))
    if start.low is not None:
        start.low.zero_()
    start.gradient.copy_(torch.tensor([2**-8, 3 * 2**-8, -(2**-8), 1.2e36, -0.4e36]))
    ours, plain = copied(start), copied(start)
    step(ADD, mode, [ours], rounding())
    reference.step(ADD, mode, [plain], rounding())
    assert ours.weight[3] == torch.inf
    assert ours.weight[4].isfinite()
    assert ours.weight[0] == (1 + 2**-7 if mode == "split" else 1)
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


def up(index: int, number: int, count: int = 1 << 16, seed: int = 0) -> torch.Tensor:
    """Which elements of 1 + 0.3 of a bfloat16's distance round up."""
    start = operand(ADD, "stochastic", count, index=index, gradient_dtype=torch.float32)
    start.weight.fill_(1.0)
    start.gradient.fill_(0.3 * 2**-7)
    stream = StochasticRounding(seed)
    stream.step = number
    step(ADD, "stochastic", [start], stream)
    return start.weight > 1


def test_the_mean_is_the_value_and_streams_are_independent():
    count = 1 << 16
    base = up(3, 1)
    deviation = (0.3 * 0.7 / count) ** 0.5
    agreement = 0.3**2 + 0.7**2
    for other in (up(3, 2), up(4, 1), up(3, 1, seed=1)):
        assert abs(other.double().mean() - 0.3) < 5 * deviation
        same = (base == other).double().mean()
        assert abs(same - agreement) < 5 * (agreement * (1 - agreement) / count) ** 0.5
    assert torch.equal(base, up(3, 1))
    for distance in (1, 2, 8, 32, 1024, 4096, 1 << 15):  # lanes, threads, warps, blocks
        same = (base[:-distance] == base[distance:]).double().mean()
        assert abs(same - agreement) < 5 * (agreement * (1 - agreement) / (count - distance)) ** 0.5


def test_every_bit_of_the_noise_is_fair_and_both_halves_are_independent():
    """On the twin, which the kernels equal bit for bit above: every step and element is as likely up as down."""
    stream = StochasticRounding(9)
    bits = []
    for stream.step in range(1, 65):
        bits.append(noise(stream, 2, 0, 1 << 12))
    drawn = torch.stack(bits)
    places = (drawn[..., None] >> torch.arange(32)) & 1
    mean = places.double().mean((0, 1))
    assert (mean - 0.5).abs().max() < 5 * 0.5 / drawn.numel() ** 0.5
    over_steps = places.double().mean(0)
    assert (over_steps - 0.5).abs().max() < 7 * 0.5 / 64**0.5
    pairs = torch.corrcoef(places.reshape(-1, 32).double().T) - torch.eye(32)
    assert pairs.abs().max() < 6 / drawn.numel() ** 0.5
