"""The Triton kernels: what they compile to for three generations of GPUs, and, run beside, what they compute."""

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_memkit.optim.fused import gpu
from lightning_memkit.optim.fused.operands import SGD, AdamW, Operand
from lightning_memkit.optim.stochastic_rounding import StochasticRounding
from tests.gpu.card import needs_cuda
from tests.optim.fused.rules import MODES, RULES, operand, rounding

HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")

AMPERE, HOPPER, BLACKWELL = 80, 90, 120


def failures_of_cases(environment: dict[str, str]) -> str:
    """What a fresh process that runs the cases prints; empty where all of them pass."""
    cases = sorted(map(str, Path(__file__).parent.glob("kernel_cases_*.py")))
    assert len(cases) == 2
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *cases],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    return done.stdout[-6000:] if done.returncode else ""


@needs_triton
@pytest.mark.long
def test_the_kernels_compute_what_plain_torch_computes_under_the_interpreter():
    assert not failures_of_cases({"TRITON_INTERPRET": "1"})


@needs_triton
@pytest.mark.gpu
def test_the_kernels_compute_what_plain_torch_computes_on_the_gpu():
    needs_cuda("the interpreter runs them on the CPU in the test before")
    assert not failures_of_cases({})


def ptx_of(name: str, mode: str, architecture: int, *, wide: bool = False, eight: bool = False) -> str:
    """PTX of the kernel of a rule, compiled as `gpu.step` launches it; ptxas accepts it, too."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lightning_memkit.optim.fused import kernels

    rule = RULES[name]
    kernel = getattr(kernels, type(rule).__name__.lower())
    constants = {"MODE": mode, "WIDE_GRADIENT": wide, "BLOCK": gpu.BLOCK}
    constants |= gpu.switches(rule, operand(rule, mode, 1).first is not None, eight)
    types = {"table": "*i64", "blocks": "*i32", "key_low": "i32", "key_high": "i32"}
    signature = {
        argument: "constexpr" if argument in constants else types.get(argument, "fp32")
        for argument in kernel.arg_names
    }
    assert list(signature.values()).count("fp32") == len(gpu.numbers(rule))
    source = ASTSource(kernel, signature, constants)
    options = {"num_warps": gpu.WARPS, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options).asm["ptx"]


def wide_bytes_per_element(ptx: str, mode: str) -> float:
    """What the full blocks' path moves: the only accesses of 16 bytes, of split24's low bytes 8, are its own."""
    vectors = re.findall(r"\b(?:ld|st)\.global(?:\.\w+)*?\.v(\d)\.b(\d+)", ptx)
    assert vectors
    narrow = [int(count) * int(bits) for count, bits in vectors if int(count) * int(bits) < 128]
    assert narrow == ([64, 64] if mode == "split24" else [])
    return sum(int(count) * int(bits) // 8 for count, bits in vectors) * 32 * gpu.WARPS / gpu.BLOCK


def expected_bytes(name: str, mode: str, *, wide: bool) -> int:
    """By the operand: each tensor read and written, the gradient read, a first step's momentum written."""
    rule = RULES[name]
    taken = operand(rule, mode, 1, gradient_dtype=torch.float32 if wide else torch.bfloat16)
    kept = [taken.weight, taken.low, taken.first, taken.second]
    both_ways = 2 * sum(tensor.element_size() for tensor in kept if tensor is not None)
    unread = 2 if isinstance(rule, SGD) and rule.first_step else 0
    return both_ways + taken.gradient.element_size() - unread


@pytest.fixture
def _compiles_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def assert_sound(ptx: str, name: str, mode: str, *, wide: bool = False) -> None:
    assert wide_bytes_per_element(ptx, mode) == expected_bytes(name, mode, wide=wide)
    # Fused, Kahan's difference would be of another sum; without .rn, ptxas might fuse.
    assert not re.search(r"\b(?:fma|mad)\.\S*f32", ptx)
    assert set(re.findall(r"\bcvt\.(\w+)\.bf16", ptx)) <= {"rn"}
    assert ("cvt.rn.bf16x2.f32" in ptx) == (mode in ("kahan", "none") or _first_is_nearest(name))


def _first_is_nearest(name: str) -> bool:
    rule = RULES[name]
    return not gpu.switches(rule, True)["STOCHASTIC"] and operand(rule, "none", 1).first is not None


@needs_triton
@pytest.mark.usefixtures("_compiles_anew")
@pytest.mark.parametrize(
    ("name", "mode", "architecture"),
    [
        *(
            ("adamw", mode, architecture)
            for mode in ("kahan", "split", "split24")
            for architecture in (80, 90, 120)
        ),
        ("sgd", "kahan", HOPPER),
        ("lion", "split", HOPPER),
    ],
)
@pytest.mark.long
def test_a_compiled_kernel_moves_each_byte_once_and_fuses_nothing(name, mode, architecture):
    ptx = ptx_of(name, mode, architecture)
    assert_sound(ptx, name, mode)
    if name == "adamw":
        assert wide_bytes_per_element(ptx, mode) == (16 if mode == "split24" else 18)


@needs_triton
@pytest.mark.usefixtures("_compiles_anew")
@pytest.mark.parametrize("name", ["adamw", "sgd", "lion"])
@pytest.mark.parametrize("architecture", [AMPERE, HOPPER, BLACKWELL])
@pytest.mark.long
def test_a_compiled_kernel_moves_moments_of_8_bits_once(name, architecture):
    """Twelve bytes a parameter for AdamW: weight and byte, and two moments, both ways, and the gradient."""
    ptx = ptx_of(name, "split24", architecture, eight=True)
    vectors = re.findall(r"\b(?:ld|st)\.global(?:\.\w+)*?\.v(\d)\.b(\d+)", ptx)
    moved = sum(int(count) * int(bits) // 8 for count, bits in vectors) * 32 * gpu.WARPS / gpu.BLOCK
    assert moved == 2 * (2 + 1) + 2 * (2 if name == "adamw" else 1) + 2
    assert not re.search(r"\b(?:fma|mad)\.\S*f32", ptx)


@needs_triton
@pytest.mark.slow
@pytest.mark.usefixtures("_compiles_anew")
@pytest.mark.parametrize("architecture", [AMPERE, HOPPER, BLACKWELL])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", RULES)
def test_every_compiled_kernel_moves_each_byte_once_and_fuses_nothing(name, mode, wide, architecture):
    assert_sound(ptx_of(name, mode, architecture, wide=wide), name, mode, wide=wide)


@needs_triton
def test_numbers_that_change_from_step_to_step_compile_nothing_anew():
    from lightning_memkit.optim.fused import kernels

    for kernel in (kernels.adamw, kernels.sgd, kernels.lion):
        unspecialised = {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
        assert unspecialised == {"key_low", "key_high"}  # the others are floats: triton specialises none
    whole = SGD(
        learning_rate=1, momentum=0, dampening=0, weight_decay=0, nesterov=False, first_step=False
    )  # ints, as a user writes them
    for rule in (*RULES.values(), whole):
        assert all(type(number) is float for number in gpu.numbers(rule))


@pytest.mark.parametrize(
    ("name", "mode", "change", "message"),
    [
        ("adamw", "kahan", {"low": None}, "low of parameter 3 is None"),
        (
            "adamw",
            "split",
            {"low": torch.zeros(8, dtype=torch.bfloat16)},
            "low of parameter 3 is torch.bfloat16",
        ),
        ("lion", "none", {"first": None}, "first of parameter 3 is None"),
        ("adamw", "none", {"second": torch.zeros(8)}, "second of parameter 3 is torch.float32"),
        ("adamw", "none", {"gradient": torch.zeros(7)}, "gradient of parameter 3 has 7 elements"),
        ("adamw", "none", {"gradient": torch.zeros(16)[::2]}, "must be contiguous"),
    ],
)
@needs_triton
def test_operands_that_would_be_read_out_of_bounds_are_refused(name, mode, change, message):
    """Before a launch: on CPU tensors there would be none without the interpreter."""
    wrong: Operand = replace(operand(RULES[name], mode, 8, index=3), **change)
    with pytest.raises(ValueError, match=message):
        gpu.step(RULES[name], mode, [wrong], rounding())


def test_triton_is_loaded_by_the_first_step_only():
    script = "import sys, lightning_memkit.optim.fused.gpu; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr[-2000:]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about machines without one")
def test_without_cuda_there_is_a_reason():
    why = gpu.why_unavailable()
    assert why is not None
    assert "CUDA" in why


@needs_triton
def test_a_device_without_memory_says_nothing_of_the_kernel(monkeypatch):
    """A first step that runs out of memory is retried; without the kernel it would need more of it."""
    shortages = [1]

    def launch(*given):
        if shortages:
            shortages.pop()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")

    zeros = torch.zeros
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "zeros", lambda *size, device, **options: zeros(*size, **options))
    monkeypatch.setattr(gpu, "step", launch)
    gpu.why_unavailable.cache_clear()
    try:
        with pytest.raises(torch.OutOfMemoryError):
            gpu.why_unavailable()
        assert gpu.why_unavailable() is None
    finally:
        gpu.why_unavailable.cache_clear()


def test_the_key_of_the_noise_fits_two_signed_numbers():
    for step in range(1, 200):
        stream = StochasticRounding(1)
        stream.step = step
        low, high = gpu._signed_halves(key := stream.stream(0, "kernels"))
        assert -(2**31) <= low < 2**31
        assert 0 <= high < 2**31
        assert (high << 32) | (low & 0xFFFFFFFF) == key


def test_a_rules_numbers_leave_no_division_by_the_root_to_the_kernel():
    rule = RULES["adamw"]
    assert isinstance(rule, AdamW)
    assert gpu.numbers(rule)[5] * rule.root_correction == pytest.approx(1)
