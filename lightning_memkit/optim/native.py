"""The C++ kernels of the CPU: built in seconds on first use, then cached in torch's folder of extensions.

Every function here has a plain-torch twin with the same result: `kahan`, `split` and `stochastic_rounding`
for the single passes, `fused.reference` for whole steps. Without a compiler the twins run, after one warning.
"""

import contextlib
import ctypes
import hashlib
import os
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

SOURCE = Path(__file__).with_name("native.cpp")
MODES = {"none": 0, "kahan": 1, "split": 2, "stochastic": 3, "split24": 4}

# Contraction would round differently from plain torch; math errors and traps only block vectorization.
_FLAGS = ("-O3", "-std=c++17", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
_FLAGS_OF_CAPABILITY = {
    "AVX2": ("-mavx2",),
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"),
}


def widen_(mode: str, high: Tensor, low: Tensor | None, out: Tensor) -> None:
    """Join flat weights and low halves into float32 ``out``; moves 8 bytes a value."""
    _kernels().memkit_widen(
        MODES[mode], address(high), address(low), address(out), high.numel(), torch.get_num_threads()
    )


def narrow_(
    mode: str, source: Tensor, high: Tensor, low: Tensor | None, noise: tuple[Tensor | None, int, int]
) -> None:
    """Split flat float32 ``source`` into ``high`` and ``low``, or round it into ``high``; moves 8 bytes a value.

    Args:
        mode: one of `MODES`.
        source: float32.
        high: bfloat16.
        low: int16 for split, int8 for split24, bfloat16 for kahan.
        noise: for stochastic, split24 and Kahan's compensation: the step's tile as int16, the stream, and the offset
            of ``source`` in the whole parameter.
    """
    tile, stream, start = noise
    _kernels().memkit_narrow(
        MODES[mode], address(source), address(high), address(low), source.numel(), address(tile),
        stream, start, torch.get_num_threads(),
    )  # fmt: skip


def step(kind: tuple[int, str, int], numbers: tuple[float, ...], operands: np.ndarray, tile: Tensor) -> None:
    """Take a whole step of all operands.

    Args:
        kind: the rule's number, the mode, and the flags of native.cpp.
        numbers: the rule's scalars, in the order in which native.cpp reads them.
        operands: uint64 [operands, fields of its struct].
        tile: the step's tile of noise as int16.
    """
    rule, mode, flags = kind
    scalars = (ctypes.c_float * len(numbers))(*numbers)
    _kernels().memkit_step(
        rule, MODES[mode], flags, scalars, operands.ctypes.data, len(operands), address(tile),
        torch.get_num_threads(),
    )  # fmt: skip


def advance_(counts: list[Tensor]) -> list[float]:
    """Add one to float32 scalars of the CPU, and return what they are then; torch takes four times as long for it."""
    pointers, after = np.array(addresses(counts), np.uint64), np.empty(len(counts), np.float32)
    _kernels().memkit_advance(pointers.ctypes.data, len(counts), after.ctypes.data)
    torch.autograd.graph.increment_version(counts)
    return after.tolist()


def address(tensor: Tensor | None) -> int:
    """The address of a tensor's first value; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def addresses(tensors: Iterable[Tensor]) -> list[int]:
    """The address of each tensor's first value."""
    return list(map(Tensor.data_ptr, tensors))


def why_unavailable() -> str | None:
    """The reason why the kernels can't be built, or None; the first call builds them."""
    loaded = _loaded()
    return loaded if isinstance(loaded, str) else None


def is_loaded() -> bool:
    """Whether the kernels can be called without being built first."""
    return _loaded.cache_info().currsize > 0 and why_unavailable() is None


@lru_cache(maxsize=1)
def available() -> bool:
    """Whether the kernels exist; the first call builds them, and warns if it can't."""
    why = why_unavailable()
    if why is not None:
        warnings.warn(
            "Optimizer steps over bfloat16 weights run in plain torch on the CPU, several times slower than with "
            f"their kernel, which can't be built: {why}. Install a C++ compiler (g++ or clang) to have it.",
            stacklevel=2,
        )
    return why is None


def _kernels() -> ctypes.CDLL:
    loaded = _loaded()
    if isinstance(loaded, str):
        raise RuntimeError(f"The CPU's kernels can't be built: {loaded}")
    return loaded


@lru_cache(maxsize=1)
def _loaded() -> "ctypes.CDLL | str":
    """The library, or the reason why there is none."""
    try:
        library = ctypes.CDLL(str(_built()))
    except (ImportError, OSError, RuntimeError) as error:
        return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    number, wide, pointer = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
    library.memkit_widen.argtypes = [number, pointer, pointer, pointer, wide, number]
    library.memkit_narrow.argtypes = [
        number, pointer, pointer, pointer, wide, pointer, ctypes.c_uint64, wide, number
    ]  # fmt: skip
    library.memkit_step.argtypes = [number, number, number, pointer, pointer, wide, pointer, number]
    library.memkit_advance.argtypes = [pointer, wide, pointer]
    library.memkit_run_on.argtypes = [pointer]
    for name in ("widen", "narrow", "step", "advance", "run_on"):
        getattr(library, f"memkit_{name}").restype = None
    library.memkit_run_on(_openmp_of_torch())
    # No thread survives a fork, and OpenMP would wait for its own.
    os.register_at_fork(after_in_child=partial(library.memkit_run_on, None))
    return library


def _openmp_of_torch() -> int | None:
    """The address of GOMP_parallel as torch's own operators find it; None where torch runs on something else."""
    try:
        of_torch = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
        return ctypes.cast(of_torch.GOMP_parallel, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


def _built() -> Path:
    """The library's file, built if it does not exist yet.

    Raises:
        ImportError, OSError, RuntimeError: there is no compiler, no ninja, or it fails.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    flags = (*_FLAGS, *_FLAGS_OF_CAPABILITY.get(capability, ()))
    digest = hashlib.sha256(SOURCE.read_bytes() + " ".join(flags).encode()).hexdigest()[:16]
    # The name includes source and CPU capability: machines of several kinds may share a home folder.
    name = f"memkit_native_{capability.lower()}_{digest}"
    from torch.utils import cpp_extension

    folder = Path(cpp_extension._get_build_directory(name, verbose=False))
    lock, library = folder / "lock", folder / f"{name}.so"
    if library.exists() and not lock.exists():
        return library
    # Torch's own lock outlives a build that was killed, and would be waited for without end. The system drops this.
    with FileLock(folder / "building"):
        if library.exists() and not lock.exists():
            return library
        lock.unlink(missing_ok=True)
        return _build(name, folder, flags)


def _build(name: str, folder: Path, flags: tuple[str, ...]) -> Path:
    from torch.utils import cpp_extension

    with _with_scripts_on_path(), warnings.catch_warnings():
        # Torch warns of compilers that it has not tested with its own headers.
        warnings.simplefilter("ignore")
        built = cpp_extension.load(
            name,
            str(SOURCE),
            extra_cflags=list(flags),
            extra_ldflags=["-pthread"],
            build_directory=str(folder),
            with_cuda=False,
            is_python_module=False,
        )
    return Path(str(built))


@contextlib.contextmanager
def _with_scripts_on_path() -> Iterator[None]:
    """Make a `ninja` that pip installed beside this Python findable, even if its environment is not activated."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join((before, sysconfig.get_path("scripts")))
    try:
        yield
    finally:
        os.environ["PATH"] = before
