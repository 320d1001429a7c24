"""An accelerator without hardware: the device "fake" counts every byte and copy, and can run out of memory.

Its memory is the host's and its arithmetic the CPU's: results are bitwise those of the CPU wherever torch runs
the same operators there. What sets an accelerator apart is real: tensors on it live in their own allocator,
autograd works on them in the device's thread, copies from and to the host are counted, and an allocation over
the budget raises `torch.OutOfMemoryError` from C++. Copies between pinned memory and the device on a stream of
their own happen as late as they may, when somebody waits for them: a wait that is missing shows as wrong values.

The device is compiled on first use (seconds) and kept in the user's cache folder. Once loaded, it is the
accelerator of its process (`torch.accelerator`) until that ends; torch has place for one such device.
"""

import atexit
import ctypes
import gc
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lightning_memkit.utilities.cached_answers import cache_folder

_SOURCE = Path(__file__).with_name("fake_device.cpp")
_COMPILERS = ("c++", "g++", "clang++")
# The order of the counters in the C++ source.
_COUNTERS = (
    "live_bytes",
    "peak_bytes",
    "allocations",
    "to_device_bytes",
    "to_device_copies",
    "to_host_bytes",
    "to_host_copies",
    "pinned_bytes",
    "pinned_peak_bytes",
    "pinned_reserved_bytes",
    "pinned_reserved_peak_bytes",
    "hazards",
    "waits",
)


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """Copies between host and device: their number, and the bytes that crossed."""

    to_device_bytes: int
    to_device_copies: int
    to_host_bytes: int
    to_host_copies: int


class FakeDevice:
    """The counters and limits of the device "fake"; made by `fake_device`.

    Bytes of the device are those asked for: nothing is rounded up, and nothing freed is kept. Pinned memory is had as
    from CUDA's allocator: by powers of two, and what is freed is kept until `torch.accelerator.empty_host_cache`.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._limits: tuple[int | None, int | None, bool] = (None, None, False)

    @property
    def torch_device(self) -> torch.device:
        """What tensors and modules are moved to."""
        return torch.device("fake", 0)

    @property
    def live_bytes(self) -> int:
        """Bytes of device memory in use."""
        return self._read("live_bytes")

    @property
    def peak_bytes(self) -> int:
        """The most bytes of device memory in use since `reset_peak`."""
        return self._read("peak_bytes")

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned host memory in use, by powers of two."""
        return self._read("pinned_bytes")

    @property
    def pinned_peak_bytes(self) -> int:
        """The most bytes of pinned host memory in use since `reset_peak`."""
        return self._read("pinned_peak_bytes")

    @property
    def pinned_reserved_bytes(self) -> int:
        """Bytes of pinned host memory in use, and of what is kept for later."""
        return self._read("pinned_reserved_bytes")

    @property
    def pinned_reserved_peak_bytes(self) -> int:
        """The most bytes of pinned host memory reserved since `reset_peak`."""
        return self._read("pinned_reserved_peak_bytes")

    @property
    def allocations(self) -> int:
        """Allocations of device memory since `reset_counts`, failed ones included; empty tensors need none."""
        return self._read("allocations")

    @property
    def hazards(self) -> int:
        """Tensors freed since `reset_counts` while a copy on a stream of its own still had to read or write them."""
        return self._read("hazards")

    @property
    def waits(self) -> int:
        """How often the host waited for all that was launched, since `reset_counts`: for copies, and numbers read.

        As on CUDA, a copy does not wait if it is `non_blocking`, from or to pinned memory.
        """
        return self._read("waits")

    @property
    def transfers(self) -> Transfers:
        """Copies between host and device since `reset_counts`; what an operator does inside is no copy."""
        return Transfers(**{field.name: self._read(field.name) for field in fields(Transfers)})

    def reset_peak(self) -> None:
        """Start new peaks, of device and pinned memory, from what is in use now."""
        self._library.memkit_fake_reset(1, 0)

    def reset_counts(self) -> None:
        """Count allocations, transfers and hazards from zero."""
        self._library.memkit_fake_reset(0, 1)

    def synchronize(self) -> None:
        """Wait until autograd's thread has let go of all it held: after a failed backward it does so late."""
        # The thread takes one task after the other, so this one comes last. Empty tensors take no memory.
        with torch.inference_mode(False), torch.enable_grad():  # also where evaluation waits for the device
            x = torch.empty(0, device="fake", requires_grad=True)
            x.view(0).backward(torch.empty(0, device="fake"))

    @property
    def budget_bytes(self) -> int | None:
        """Live bytes that no allocation may exceed; None where there is no limit."""
        return self._limits[0]

    def set_limits(
        self, budget_bytes: int | None = None, fail_at: int | None = None, *, repeat: bool = False
    ) -> None:
        """Make allocations fail with `torch.OutOfMemoryError`; None lifts a limit.

        Args:
            budget_bytes: live bytes that no allocation may exceed.
            fail_at: the index of the one allocation that fails, as `allocations` counts.
            repeat: every later one fails too.

        Raises:
            ValueError: a limit below zero.
        """
        for name, value in (("budget_bytes", budget_bytes), ("fail_at", fail_at)):
            if value is not None and value < 0:
                raise ValueError(f"{name}={value} is below zero; write None for no limit.")
        self._limits = budget_bytes, fail_at, repeat
        numbers = (-1 if limit is None else limit for limit in (budget_bytes, fail_at))
        self._library.memkit_fake_set_limits(*numbers, int(repeat))

    def _read(self, name: str) -> int:
        return self._library.memkit_fake_read(_COUNTERS.index(name))


@contextmanager
def fake_device(budget_bytes: int | None = None, fail_at: int | None = None) -> Iterator[FakeDevice]:
    """Use the device "fake", with counts from zero; the limits before are back after it.

    Garbage of earlier uses is collected first: let go of within, it would lower what is read there.

    Args:
        budget_bytes: live bytes above this raise `torch.OutOfMemoryError`.
        fail_at: the index of the allocation (0 for the first within) that raises `torch.OutOfMemoryError`.

    Raises:
        RuntimeError: the device can't be compiled, or another custom device has torch's one place.
    """
    device = _loaded()
    before = device._limits
    gc.collect()
    device._library.memkit_fake_empty_host_cache()
    device.reset_counts()
    device.reset_peak()
    device.set_limits(budget_bytes, fail_at)
    try:
        yield device
    finally:
        device.set_limits(*before[:2], repeat=before[2])


def compiler() -> str | None:
    """The C++ compiler that builds the device: ``$CXX``, else the first found of c++, g++ and clang++."""
    named = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, (named,) if named else _COMPILERS)), None)


@cache
def _loaded() -> FakeDevice:
    """Load the library, register the device, and make it known to every part of torch."""
    name = torch._C._get_privateuse1_backend_name()
    if name != "privateuseone":
        raise RuntimeError(
            f"This process has the custom device {name!r}, and torch has place for one; use the device 'fake' in a "
            "process of its own."
        )
    library = ctypes.CDLL(str(_built()))
    library.memkit_fake_read.restype = ctypes.c_int64
    library.memkit_fake_set_limits.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_int]
    library.memkit_fake_register()
    torch.utils.rename_privateuse1_backend("fake")
    device = FakeDevice(library)
    torch._register_device_module("fake", _device_module(device))
    accelerator: Any = torch.accelerator
    if not hasattr(accelerator, "empty_host_cache"):  # an older torch has it for CUDA alone
        accelerator.empty_host_cache = library.memkit_fake_empty_host_cache
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    # If the interpreter ends while the device's autograd thread starts or lets go of Python objects, the process
    # hangs or aborts: so wait for its start here, and let it have the interpreter once more at the end.
    device.synchronize()
    atexit.register(time.sleep, 0.05)
    return device


def _built() -> Path:
    """The compiled library. No build tool of torch's is needed: it is one file, and one call of the compiler."""
    include, libraries = Path(torch.__file__).parent / "include", Path(torch.__file__).parent / "lib"
    flags = [
        "-O1",
        "-std=c++20",
        "-fPIC",
        "-shared",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{folder}" for folder in (include, include / "torch/csrc/api/include")),
    ]
    links = [f"-L{libraries}", "-lc10", "-ltorch_cpu", "-ltorch", f"-Wl,-rpath,{libraries}"]
    contents = "\n".join((torch.__version__, sys.platform, *flags, _SOURCE.read_text()))
    digest = hashlib.sha256(contents.encode()).hexdigest()[:16]
    path = cache_folder() / f"fake_device-{digest}.so"
    if path.exists():
        return path
    command = compiler()
    if command is None:
        raise RuntimeError(
            "The device 'fake' is compiled on first use, and no C++ compiler is found; install g++ or clang++, or "
            "name one in the environment variable CXX."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        done = subprocess.run(
            [command, *flags, str(_SOURCE), "-o", str(built), *links],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{command} can't compile the device 'fake':\n{done.stderr[-4000:]}")
        built.replace(path)  # whole or not at all: another process may be building it too
    return path


def _device_module(device: FakeDevice) -> ModuleType:
    """``torch.fake``: what torch and Lightning ask of a device's module."""
    module: Any = ModuleType("torch.fake")
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = module.manual_seed_all = lambda *_: None
    module.synchronize = lambda *_: device.synchronize()
    module.device = module.device_of = lambda _: nullcontext()  # there is one, so it is the current one
    module.current_stream = lambda *_: torch.accelerator.current_stream()  # torch's checkpoints ask for it
    module.stream = lambda stream: stream
    module._is_in_bad_fork = lambda: False
    module._lazy_init = module.empty_cache = lambda: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.get_rng_state = _get_rng_state
    module.set_rng_state = _set_rng_state
    module.memory_allocated = lambda *_: device.live_bytes
    module.max_memory_allocated = lambda *_: device.peak_bytes
    module.reset_peak_memory_stats = lambda *_: device.reset_peak()
    return module


# Random numbers come from the CPU's default generator: one seed gives one result there and here.
def _get_rng_state(device: object = None) -> Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: Tensor, device: object = None) -> None:
    torch.set_rng_state(new_state)
