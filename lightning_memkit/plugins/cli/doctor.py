"""Report what this machine offers and what memkit therefore uses; allocates a few bytes at most."""

import os
import platform
import shutil
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from lightning_memkit.attention.choice import choose, has_flash_attn
from lightning_memkit.data.loading.copy_ahead import pinning_helps
from lightning_memkit.memory.measure import capacity
from lightning_memkit.memory.processors import allowed_processors, quotas
from lightning_memkit.memory.units import format_bytes
from lightning_memkit.optim import native

PACKAGES = (
    "torch",
    "lightning",
    "torchmetrics",
    "jsonargparse",
    "transformers",
    "bitsandbytes",
    "flash-attn",
    "torchao",
    "triton",
)


@dataclass(frozen=True, kw_only=True)
class Host:
    """The processors and memory that this process may use; None means that no quota or limit is set."""

    system: str
    python: str
    cores: int
    usable_cores: int
    quota_cores: float | None
    memory_bytes: int
    free_bytes: int
    shared_memory_bytes: int | None
    open_files: int | None


@dataclass(frozen=True, kw_only=True)
class FoundDevice:
    """One accelerator, or the CPU where there is none."""

    name: str
    device: str
    memory_bytes: int
    free_bytes: int
    capability: str | None
    bfloat16: str


@dataclass(frozen=True, kw_only=True)
class BackendChoice:
    """What memkit uses for one purpose on this machine, and why."""

    purpose: str
    choice: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All findings; `as_dict` gives plain values for JSON."""

    host: Host
    devices: tuple[FoundDevice, ...]
    kernels: dict[str, bool]
    packages: dict[str, str | None]
    choices: tuple[BackendChoice, ...]

    def as_dict(self) -> dict[str, Any]:
        """Nested dicts and lists of plain values."""
        return asdict(self)


def diagnose() -> Diagnosis:
    """Inspect this machine: its processors, memory, accelerators, kernels, packages and limits."""
    devices = tuple(_devices())
    packages = {name: _version(name) for name in PACKAGES}
    kernels = _kernels()
    return Diagnosis(
        host=_host(),
        devices=devices,
        kernels=kernels,
        packages=packages,
        choices=tuple(_choices(devices[0])),
    )


def _host() -> Host:
    memory = capacity(torch.device("cpu"))
    return Host(
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        cores=os.cpu_count() or 1,
        usable_cores=allowed_processors(),
        quota_cores=min(quotas(), default=None),
        memory_bytes=memory.total_bytes,
        free_bytes=memory.free_bytes,
        shared_memory_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None,
        open_files=_open_files(),
    )


def _open_files() -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _devices() -> list[FoundDevice]:
    if torch.cuda.is_available():
        return [_cuda(index) for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        return [_device("mps", "Apple GPU", None, "in hardware or emulated, by generation")]
    return [_device("cpu", platform.processor() or platform.machine(), _cpu_capability(), _cpu_bfloat16())]


def _cuda(index: int) -> FoundDevice:
    major, minor = torch.cuda.get_device_capability(index)
    bfloat16 = "in hardware" if major >= 8 else "emulated"
    return _device(f"cuda:{index}", torch.cuda.get_device_name(index), f"{major}.{minor}", bfloat16)


def _device(device: str, name: str, capability: str | None, bfloat16: str) -> FoundDevice:
    memory = capacity(torch.device(device))
    return FoundDevice(
        name=name,
        device=device,
        memory_bytes=memory.total_bytes,
        free_bytes=memory.free_bytes,
        capability=capability,
        bfloat16=bfloat16,
    )


def _cpu_capability() -> str:
    return torch.backends.cpu.get_cpu_capability()


def _cpu_bfloat16() -> str:
    # Private names, absent in some versions and on some processors; the answer is then "unknown".
    for name, label in (("_is_amx_tile_supported", "AMX"), ("_is_avx512_bf16_supported", "AVX512-BF16")):
        supported = getattr(torch.cpu, name, None)
        if supported is not None and supported():
            return f"in hardware ({label})"
    known = hasattr(torch.cpu, "_is_avx512_bf16_supported") and platform.machine() in ("x86_64", "AMD64")
    return "emulated" if known else "unknown"


def _kernels() -> dict[str, bool]:
    cuda = torch.cuda.is_available()
    cpu = not cuda and not torch.backends.mps.is_available()
    ampere = cuda and torch.cuda.get_device_capability(0) >= (8, 0)
    return {
        "SDPA flash": cpu or (ampere and torch.backends.cuda.is_flash_attention_available()),
        "SDPA memory-efficient": cuda,
        "SDPA cuDNN": ampere and torch.backends.cudnn.is_available(),
        "SDPA math": True,
        "varlen attention": ampere and find_spec("torch.nn.attention.varlen") is not None,
        "flash-attn": ampere and has_flash_attn(),
        "Triton": cuda and find_spec("triton") is not None,
        "C++ compiler for torch.compile": _compiler() is not None,
    }


def _compiler() -> str | None:
    return next(
        (
            path
            for name in (os.environ.get("CXX"), "g++", "clang++", "cl")
            if name and (path := shutil.which(name))
        ),
        None,
    )


def _step_choice(kind: str) -> BackendChoice:
    """What runs the step of AdamW, SGD and Lion on bfloat16 weights."""
    purpose = "compensated optimizer step"
    if kind == "cpu":
        why = native.why_unavailable()
        if why is None:
            return BackendChoice(
                purpose=purpose, choice="C++ kernel", reason="AdamW, SGD, Lion; others in plain torch"
            )
        return BackendChoice(purpose=purpose, choice="plain torch", reason=f"several times slower: {why}")
    if kind == "cuda" and find_spec("triton") is not None:
        return BackendChoice(
            purpose=purpose, choice="Triton kernel", reason="AdamW, SGD, Lion; others in plain torch"
        )
    reason = "triton is not installed" if kind == "cuda" else f"there is no kernel for {kind}"
    return BackendChoice(purpose=purpose, choice="plain torch", reason=reason)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _choices(device: FoundDevice) -> list[BackendChoice]:
    where = torch.device(device.device)
    cuda, pinned = where.type == "cuda", pinning_helps(where)
    backend = choose(torch.empty(1, 1, 1, 64, dtype=torch.bfloat16, device=where))
    reasons = {
        "loop": "SDPA, document by document; the packed kernels need half precision on CUDA 8.0 or higher",
        "varlen": "torch's own kernel; the flash-attn package is not installed",
        "flash_attn": "the package is installed",
        "flex": "compiled FlexAttention; neither packed kernel can run",
    }
    return [
        BackendChoice(purpose="training device", choice=device.device, reason=device.name),
        BackendChoice(purpose="packed_attention in bfloat16", choice=backend, reason=reasons[backend]),
        BackendChoice(
            purpose="memory meter of MemoryBudget",
            choice="the CUDA allocator" if cuda else "operator by operator",
            reason="what the allocator reserves" if cuda else "this device's allocator keeps no peak",
        ),
        BackendChoice(
            purpose="pinned batches of PackedDataModule and LoaderTuner",
            choice="yes" if pinned else "no",
            reason="copies overlap with computation" if pinned else "no batch is copied to another memory",
        ),
        _step_choice(where.type),
        BackendChoice(
            purpose="models named in a config",
            choice=f"built on {device.device}",
            reason="no float32 copy is made on the way",
        ),
    ]


def summary(diagnosis: Diagnosis) -> dict[str, list[tuple[str, str]]]:
    """The findings as titled lists of (what, finding), ready to print."""
    host = diagnosis.host
    quota = "no quota" if host.quota_cores is None else f"quota {host.quota_cores:g}"
    machine = [
        ("system", f"{host.system}, Python {host.python}"),
        ("cores", f"{host.usable_cores} usable of {host.cores}, {quota}"),
        ("memory", f"{format_bytes(host.free_bytes)} free of {format_bytes(host.memory_bytes)}"),
    ]
    if host.shared_memory_bytes is not None:
        machine.append(("shared memory (loader workers)", format_bytes(host.shared_memory_bytes)))
    if host.open_files is not None:
        machine.append(("open files", str(host.open_files)))
    devices = [
        (
            found.device,
            f"{found.name}, {format_bytes(found.free_bytes)} free of {format_bytes(found.memory_bytes)}, "
            f"capability {found.capability or 'unknown'}, bfloat16 {found.bfloat16}",
        )
        for found in diagnosis.devices
    ]
    packages = [
        (name, found or f"not installed: pip install {name}") for name, found in diagnosis.packages.items()
    ]
    return {
        "This machine": machine,
        "Devices": devices,
        "Kernels": [(name, "yes" if found else "no") for name, found in diagnosis.kernels.items()],
        "Packages": packages,
        "memkit will use": [(c.purpose, f"{c.choice}: {c.reason}") for c in diagnosis.choices],
    }
