"""The fused steps on the CPU, in C++: built in seconds on first use, then kept in torch's folder of extensions."""

import contextlib
import ctypes
import hashlib
import os
import sysconfig
import time
import warnings
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from lightning_memkit.optim.fused.operands import SGD, AdamW, Operand, Rule, first_is_stochastic
from lightning_memkit.optim.modes import Mode
from lightning_memkit.optim.stochastic_rounding import StochasticRounding

SOURCE = Path(__file__).with_name("step.cpp")
_STALE_LOCK_SECONDS = 600

# Contraction would round elsewhere than the reference does; math errors and traps only stop the vectoriser.
_FLAGS = ("-O3", "-std=c++17", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
_FLAGS_OF_CAPABILITY = {
    "AVX2": ("-mavx2",),
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"),
}
_MODES: dict[Mode, int] = {"none": 0, "kahan": 1, "split": 2, "stochastic": 3}
_FIRST_IS_STOCHASTIC, _DECOUPLED, _MAXIMIZE, _NESTEROV, _FIRST_STEP = 1, 2, 4, 8, 16


def step(rule: Rule, mode: Mode, operands: Sequence[Operand], rounding: StochasticRounding) -> None:
    """Step every operand in one pass over its memory, in as many threads as torch uses; see `reference.step`.

    Raises:
        RuntimeError: there is no kernel; ask `why_unavailable` first.
    """
    library = _library()
    if isinstance(library, str):
        raise RuntimeError(f"The fused CPU step can't be built: {library}")
    number, numbers, flags = _numbers(rule)
    packed = [field for operand in operands for field in _fields(rule, operand, rounding)]
    tile = rounding.tile().to(torch.int16)
    library.memkit_step(
        number,
        _MODES[mode],
        flags | (_FIRST_IS_STOCHASTIC if first_is_stochastic(rule) else 0),
        (ctypes.c_float * len(numbers))(*numbers),
        (ctypes.c_uint64 * len(packed))(*packed),
        len(operands),
        ctypes.c_void_p(tile.data_ptr()),
        torch.get_num_threads(),
    )


def why_unavailable() -> str | None:
    """Why there is no kernel here; None where there is one, which the first call builds."""
    library = _library()
    return library if isinstance(library, str) else None


def _fields(rule: Rule, operand: Operand, rounding: StochasticRounding) -> tuple[int, ...]:
    """The struct `Operand` of step.cpp."""

    def stream(name: str) -> int:
        return rounding.stream(operand.index, name) if name else 0

    return (
        operand.weight.data_ptr(),
        _address(operand.low),
        operand.gradient.data_ptr(),
        int(operand.gradient.dtype == torch.float32),
        _address(operand.first),
        _address(operand.second),
        operand.weight.numel(),
        stream("weight"),
        stream(rule.first_name),
        stream(rule.second_name),
    )


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _numbers(rule: Rule) -> tuple[int, tuple[float, ...], int]:
    """The rule's number in step.cpp, its scalars in the order in which they are read there, and its flags."""
    if isinstance(rule, AdamW):
        scalars = (rule.shrink, rule.weight_decay, 1 - rule.beta1, rule.beta2, 1 - rule.beta2,
                   rule.root_correction, rule.eps, -rule.step_size)  # fmt: skip
        return 0, scalars, (_DECOUPLED if rule.decoupled else 0) | (_MAXIMIZE if rule.maximize else 0)
    if isinstance(rule, SGD):
        flags = (_MAXIMIZE if rule.maximize else 0) | (_NESTEROV if rule.nesterov else 0)
        scalars = (rule.weight_decay, rule.momentum, 1 - rule.dampening, -rule.learning_rate)
        return 1, scalars, flags | (_FIRST_STEP if rule.first_step else 0)
    scalars = (rule.shrink, rule.beta1, 1 - rule.beta1, rule.beta2, 1 - rule.beta2, -rule.learning_rate)
    return 2, scalars, 0


@lru_cache(maxsize=1)
def _library() -> "ctypes.CDLL | str":
    """The loaded kernel, or why there is none."""
    capability = torch.backends.cpu.get_cpu_capability()
    flags = (*_FLAGS, *_FLAGS_OF_CAPABILITY.get(capability, ()))
    digest = hashlib.sha256(SOURCE.read_bytes() + " ".join(flags).encode()).hexdigest()[:16]
    try:
        from torch.utils import cpp_extension

        # The name tells sources and processors apart: a home folder may be shared by machines of several kinds.
        name = f"memkit_step_{capability.lower()}_{digest}"
        folder = cpp_extension._get_build_directory(name, verbose=False)
        _drop_stale_lock(Path(folder) / "lock")
        with _with_scripts_on_path(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about compilers that torch hasn't tested its own headers with
            path = cpp_extension.load(
                name,
                str(SOURCE),
                extra_cflags=list(flags),
                build_directory=folder,
                with_cuda=False,
                is_python_module=False,
            )
        library = ctypes.CDLL(str(path))
    except (ImportError, OSError, RuntimeError) as error:
        return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    pointer = ctypes.c_void_p
    library.memkit_step.argtypes = [
        *(3 * [ctypes.c_int]), pointer, pointer, ctypes.c_int64, pointer, ctypes.c_int
    ]  # fmt: skip
    library.memkit_step.restype = None
    return library


def _drop_stale_lock(lock: Path) -> None:
    """Remove the lock of a build that was killed: torch would wait for it without end."""
    with contextlib.suppress(OSError):
        if time.time() - lock.stat().st_mtime > _STALE_LOCK_SECONDS:
            lock.unlink()


@contextlib.contextmanager
def _with_scripts_on_path() -> Iterator[None]:
    """Let a `ninja` that pip installed beside this Python be found, also when its environment isn't active."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join((before, sysconfig.get_path("scripts")))
    try:
        yield
    finally:
        os.environ["PATH"] = before
