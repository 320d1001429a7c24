"""The C++ kernel beside the plain-torch reference, both against float64."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from lightning_memkit.optim import native
from lightning_memkit.optim.fused import cpu, reference
from lightning_memkit.optim.fused.operands import SGD, AdamW
from lightning_memkit.optim.stochastic_rounding import TILE
from tests.optim.fused.rules import MODES, RULES, copied, master, operand, rounding, truth

pytestmark = pytest.mark.skipif(
    native.why_unavailable() is not None, reason=f"no kernel: {native.why_unavailable()}"
)

# A kernel may err as much as plain torch does, and a rounding of the last float32 bit more.
TOLERANCE = {"kahan": 2**-16, "split": 2**-21, "split24": 2**-15, "stochastic": 2**-7, "none": 2**-8}


def largest_error(stepped, expected, scale) -> float:
    return float(((stepped - expected).abs() / scale).max())


@pytest.mark.parametrize("gradient_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", RULES)
def test_the_kernel_errs_as_little_as_plain_torch(name, mode, gradient_dtype):
    rule = RULES[name]
    start = operand(rule, mode, gradient_dtype=gradient_dtype)
    expected = truth(rule, start)
    ours, plain = copied(start), copied(start)
    cpu.step(rule, mode, [ours], rounding())
    reference.step(rule, mode, [plain], rounding())
    scale = expected[0].abs() + 1e-3
    error = largest_error(master(ours), expected[0], scale)
    assert error <= largest_error(master(plain), expected[0], scale) + 2**-21
    assert error <= TOLERANCE[mode]
    assert not torch.equal(ours.weight, start.weight) or mode == "none"
    for moment, exact in (("first", expected[1]), ("second", expected[2])):
        if exact is not None:
            stored = getattr(ours, moment).double()
            assert largest_error(stored, exact, exact.abs() + 1e-12) <= 2**-7  # a bfloat16's distance
            assert float((stored != getattr(plain, moment).double()).double().mean()) < 2e-3


@pytest.mark.parametrize("mode", MODES)
def test_the_noise_is_that_of_plain_torch(mode):
    """Where float32 results agree, the bits agree; they differ where torch fuses a multiplication and an addition."""
    rule = RULES["adam-maximize-slow"]
    start = operand(rule, mode, 3 * TILE + 17)
    ours, plain = copied(start), copied(start)
    cpu.step(rule, mode, [ours], rounding(7))
    reference.step(rule, mode, [plain], rounding(7))
    for name in ("weight", "first", "second"):
        assert float((getattr(ours, name) != getattr(plain, name)).double().mean()) < 1e-3
    other = copied(start)
    cpu.step(rule, mode, [other], rounding(8))
    assert float((ours.second != other.second).double().mean()) > 0.2


SPECIAL = [0.0, -0.0, float("nan"), float("inf"), float("-inf"), 1e-40, -1e-40, 3.4028e38, -3.3962e38, 1.0]


@pytest.mark.parametrize("mode", MODES)
def test_special_values_are_kept_as_plain_torch_keeps_them(mode):
    rule = SGD(learning_rate=0.0, momentum=0.9, dampening=0, weight_decay=0, nesterov=False, first_step=True)
    start = operand(rule, mode, len(SPECIAL))
    start.weight.copy_(torch.tensor(SPECIAL))
    start.gradient.zero_()
    if start.low is not None:  # a stale negative low half beside the zeros
        start.low.copy_(torch.tensor([-5, -7, 0, 0, 0, 3, -3, 0, 0, 100]))
    if mode == "kahan":
        assert start.low is not None
        start.low.zero_()
    ours, plain = copied(start), copied(start)
    cpu.step(rule, mode, [ours], rounding())
    reference.step(rule, mode, [plain], rounding())
    assert torch.equal(ours.weight.isnan(), plain.weight.isnan())
    kept = ~ours.weight.isnan()
    assert torch.equal(ours.weight[kept].view(torch.int16), plain.weight[kept].view(torch.int16))
    if ours.low is not None and plain.low is not None:
        assert torch.equal(ours.low.view(torch.int16), plain.low.view(torch.int16))
    assert int(ours.weight.isnan().sum()) == 1


@pytest.mark.parametrize("threads", [1, 3])
def test_many_operands_and_threads_change_nothing(threads):
    rule, before = RULES["adamw"], torch.get_num_threads()
    counts = [1, 7, 127, 128, 129, 1000, TILE - 1, TILE, TILE + 1, 0, 2 * TILE + 300]
    starts = [operand(rule, "split", count, index=place) for place, count in enumerate(counts)]
    together = [copied(start) for start in starts]
    torch.set_num_threads(threads)
    try:
        cpu.step(rule, "split", together, rounding())
    finally:
        torch.set_num_threads(before)
    for start, ours in zip(starts, together, strict=True):
        alone = copied(start)
        cpu.step(rule, "split", [alone], rounding())
        for name in ("weight", "low", "first", "second"):
            assert torch.equal(getattr(ours, name), getattr(alone, name))


def test_an_adamw_step_allocates_nothing_of_its_size():
    from lightning_memkit.memory.meter import ByteMeter

    rule = RULES["adamw"]
    assert isinstance(rule, AdamW)
    ours = operand(rule, "kahan", 40 * TILE)
    with ByteMeter() as meter:
        cpu.step(rule, "kahan", [ours], rounding())
    assert meter.peak_bytes < 1 << 21  # the tile; a float32 copy of the weights would take ten times that


@pytest.mark.long
def test_without_a_compiler_there_is_a_reason(tmp_path):
    """In a fresh process, with an empty folder of extensions and no compiler to be found."""
    script = (
        "import warnings, torch\n"
        "from lightning_memkit import compensate\n"
        "weight = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))\n"
        "optimizer = torch.optim.SGD([weight], lr=0.1)\n"
        "compensate(optimizer)\n"
        "weight.grad = torch.ones_like(weight)\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    optimizer.step(); optimizer.step()\n"
        "print(len([w for w in caught if 'plain torch on the CPU' in str(w.message)]), weight[0].item())\n"
    )
    environment = {"PATH": str(tmp_path), "TORCH_EXTENSIONS_DIR": str(tmp_path), "CXX": "no-compiler"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    count, weight = done.stdout.split()
    assert count == "1"
    assert float(weight) == pytest.approx(0.8, abs=2e-3)


@pytest.mark.parametrize("backend", [cpu, reference])
@pytest.mark.parametrize("mode", MODES)
def test_a_shard_steps_as_its_elements_of_the_whole_do(mode, backend):
    rule = RULES["adam-maximize-slow"]
    whole = operand(rule, mode, 3 * TILE)
    cuts = [slice(0, TILE // 2 + 3), slice(TILE // 2 + 3, 2 * TILE + 9), slice(2 * TILE + 9, 3 * TILE)]
    names = ("weight", "low", "gradient", "first", "second")
    shards = [
        replace(
            whole,
            start=cut.start,
            **{
                name: None if getattr(whole, name) is None else getattr(whole, name)[cut].clone()
                for name in names
            },
        )
        for cut in cuts
    ]
    backend.step(rule, mode, shards, rounding())
    backend.step(rule, mode, [whole], rounding())
    for cut, shard in zip(cuts, shards, strict=True):
        for name in names:
            if getattr(whole, name) is not None:
                assert torch.equal(getattr(shard, name), getattr(whole, name)[cut])
