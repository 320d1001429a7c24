"""What predictions and plans assume of a card, asked of the one that is here; and the notes of scripts/first_card.sh.

`python scripts/card_facts.py --results DIR` writes `card_facts-<card>.json`. Each row has what was assumed beside what
was found.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.harness import Options, Report
from benchmarks.record import RESULTS, describe_hardware, git_commit, installed_versions, record
from lightning_memkit.activations.offload import room_on_the_host as auto_room
from lightning_memkit.activations.offload_choice import measure_copy_rates
from lightning_memkit.memory.cublas import cublas_bytes
from lightning_memkit.memory.limits import host_limits
from lightning_memkit.memory.measure import fixed_bytes
from lightning_memkit.memory.pinned import return_pinned
from lightning_memkit.planning.budget import Budget
from lightning_memkit.planning.times import DeviceClocks, launched
from lightning_memkit.prediction.devices import Device
from lightning_memkit.prediction.simulation import Simulation

MIB = 1 << 20
GROWTH_BYTES = 4 << 30
ROWS, HEADS, LENGTH, FEATURES = 2, 8, 512, 64
Row = dict[str, object]


def main() -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    parser.add_argument("--note", type=Path, help="append a line on the stage in $STAGE and $STATUS instead")
    chosen = parser.parse_args()
    if chosen.note:
        note_stage(chosen.note)
        return 0
    if not torch.cuda.is_available():
        print("No CUDA device is present: there are no facts to ask for.")
        return 2
    began = time.monotonic()
    rows: list[Row] = []
    # The host before anything takes of it. The context before what loads kernels. Then the workspaces: a product
    # anywhere else makes the first one.
    for ask in (host, context, workspaces, attention, copies, launches, pinned, growth):
        try:
            found: list[Row] = list(ask(torch.device("cuda", torch.cuda.current_device())))
        except Exception as error:  # one fact that can't be had must not cost the others
            found: list[Row] = [{"what": ask.__name__, "error": f"{type(error).__name__}: {error}"}]
        rows += found
        for row in found:
            print(json.dumps(row), flush=True)
    figures: dict[str, float | int | bool] = {
        "facts": len(rows),
        "errors": sum("error" in row for row in rows),
        "other_than_assumed": sum(row.get("as_assumed") is False for row in rows),
    }
    report = Report("card_facts", figures, rows, notes=(versions(),))
    seconds = time.monotonic() - began
    program, folder = "scripts/card_facts.py", chosen.results
    print(record(report, Options(), seconds=seconds, on_gpu=True, folder=folder, program=program))
    return 0


def note_stage(path: Path) -> None:
    """Append what became of a stage."""
    on_gpu = torch.cuda.is_available()
    line = {
        "stage": os.environ["STAGE"],
        "status": os.environ["STATUS"],
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "commit": git_commit(),
        "card": describe_hardware(on_gpu=on_gpu)["gpu"] or "none",
        "torch": installed_versions().get("torch", "unknown"),
    }
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def versions() -> str:
    """Of what decides about kernels and memory besides torch."""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.CalledProcessError):
        driver = "unknown"
    return (
        f"driver {driver}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, "
        f"allocator {os.environ.get('PYTORCH_CUDA_ALLOC_CONF') or 'as by default'}"
    )


def host(device: torch.device) -> Iterator[Row]:
    """Every limit on the host's memory, what may be pinned of it, and what activation offload takes by itself."""
    for limit in host_limits():
        yield {
            "what": f"host memory: {limit.source}",
            "total_bytes": limit.total_bytes,
            "free_bytes": limit.free_bytes,
        }
    yield {"what": "host memory that may be locked (ulimit -l)", "total_bytes": lock_limit()}
    yield {"what": 'host_bytes="auto" of activation offload', "found_bytes": auto_room()}


def lock_limit() -> int | None:
    """The most bytes that this process may lock; None for no limit, or where the system knows none."""
    if sys.platform == "win32":
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def growth(device: torch.device) -> Iterator[Row]:
    """Whether the host has more memory once some was pinned: `host_bytes="auto"` then asks again."""
    before, room_before = host_limits(), auto_room()
    size = min(GROWTH_BYTES, min(limit.free_bytes for limit in before) // 4)
    buffer = pinned_buffer(size)
    after, room_after = host_limits(), auto_room()
    del buffer
    return_pinned()
    yield {
        "what": "host memory while some is pinned",
        "pinned_bytes": size,
        "total_bytes_before": min(limit.total_bytes for limit in before),
        "total_bytes_after": min(limit.total_bytes for limit in after),
        "auto_bytes_before": room_before,
        "auto_bytes_after": room_after,
        "grew": min(limit.total_bytes for limit in after) > min(limit.total_bytes for limit in before),
    }


def pinned_buffer(size_bytes: int) -> Tensor:
    """Pinned memory, every page of which was written to: a host that grows does so only then."""
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True).fill_(1)


def context(device: torch.device) -> Iterator[Row]:
    """What the driver counts of this process, and of others, before a tensor is there."""
    torch.zeros(1, device=device)
    assumed = target().context_bytes
    found = fixed_bytes(device)
    yield {
        "what": "context and other processes",
        "assumed_bytes": assumed,
        "found_bytes": found,
        "as_assumed": abs(found - assumed) < 256 * MIB,
    }


def workspaces(device: torch.device) -> Iterator[Row]:
    """What cuBLAS keeps after a product in the forward's thread, and after one in the backward's."""
    weight = torch.randn(256, 256, device=device, requires_grad=True)
    x = torch.randn(256, 256, device=device)
    before = torch.cuda.memory_allocated(device)
    out = x @ weight
    after_forward = torch.cuda.memory_allocated(device) - out.nbytes
    out.sum().backward()
    assert weight.grad is not None
    held = out.nbytes + weight.grad.nbytes
    torch.cuda.synchronize(device)
    after_backward = torch.cuda.memory_allocated(device) - held
    each = cublas_bytes(device) // 2
    counts = (("forward", after_forward - before, each), ("both", after_backward - before, 2 * each))
    for name, found, assumed in counts:
        yield {
            "what": f"cuBLAS after {name}",
            "assumed_bytes": assumed,
            "found_bytes": found,
            "as_assumed": abs(found - assumed) <= 4096,  # sums and their gradients are a block each
        }


def attention(device: torch.device) -> Iterator[Row]:
    """Which kernel scaled_dot_product_attention takes, by shape, beside what predictions assume."""
    shapes: dict[str, dict[str, Any]] = {
        "causal": {"is_causal": True},
        "full": {},
        "boolean mask": {"attn_mask": torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()},
        "additive mask": {"attn_mask": torch.zeros(LENGTH, LENGTH)},
        "grouped queries": {"is_causal": True, "kv_heads": 2},
        "grouped queries, masked": {
            "attn_mask": torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(),
            "kv_heads": 2,
        },
        "wide values": {"is_causal": True, "value_features": 2 * FEATURES},
        "256 features": {"is_causal": True, "features": 256},
        "dropout": {"is_causal": True, "dropout_p": 0.1},
    }
    for name, options in shapes.items():
        for dtype in (torch.bfloat16, torch.float32):
            ask = partial(kernel_of, dtype=dtype, **options)
            with Simulation(target()):
                assumed = ask(torch.device("cpu"))
            found = ask(device)
            yield {
                "what": f"attention, {name}, {str(dtype).removeprefix('torch.')}",
                "assumed": assumed,
                "found": found,
                "as_assumed": found == assumed,
            }


def kernel_of(
    device: torch.device,
    dtype: torch.dtype,
    *,
    kv_heads: int = HEADS,
    features: int = FEATURES,
    value_features: int | None = None,
    attn_mask: Tensor | None = None,
    **options: Any,
) -> str:
    """The kernel, by the name of its backward."""

    def made(heads: int, width: int) -> Tensor:
        return torch.empty(ROWS, heads, LENGTH, width, dtype=dtype, device=device).requires_grad_()

    if attn_mask is not None:
        attn_mask = attn_mask.to(device) if attn_mask.dtype is torch.bool else attn_mask.to(device, dtype)
    out = F.scaled_dot_product_attention(
        made(HEADS, features),
        made(kv_heads, features),
        made(kv_heads, value_features or features),
        attn_mask=attn_mask,
        enable_gqa=kv_heads != HEADS,
        **options,
    )
    # What lies around the kernel are views and padding: the nearest node that is named for attention.
    waiting = [out.grad_fn]
    for _ in range(8):
        for node in waiting:
            name = "" if node is None else node.name()
            for kernel in ("Flash", "Cudnn", "Efficient"):
                if f"DotProduct{kernel}" in name:
                    return kernel.lower()
        waiting = [below for node in waiting if node is not None for below, _ in node.next_functions]
    return "math"


def copies(device: torch.device) -> Iterator[Row]:
    """How fast pinned memory is copied, beside what plans count with."""
    rates = measure_copy_rates(device)
    yield {
        "what": "copies of pinned memory",
        "assumed_bytes_per_second": target().host_bytes_per_second,
        "to_host": rates.to_host,
        "to_device": rates.to_device,
    }


def launches(device: torch.device) -> Iterator[Row]:
    """What a small operator takes on the device, and its launch on the host."""
    x = torch.ones(8, 8, device=device)
    took = launched(x.tanh, clocks=DeviceClocks(device))
    yield {
        "what": "launch of tanh on 64 elements",
        "device_us": 1e6 * took.device,
        "host_us": 1e6 * took.host,
    }


def pinned(device: torch.device) -> Iterator[Row]:
    """What pinned memory takes for a buffer of 33 MiB, and whether it goes back."""
    stats: Any = getattr(torch.cuda, "host_memory_stats", None)
    if stats is None:
        return
    buffer = torch.empty(33 * MIB, dtype=torch.uint8, pin_memory=True)
    found = {name: value for name, value in stats().items() if name.endswith("bytes.current")}
    del buffer
    yield {"what": "pinned buffer of 33 MiB", "assumed_bytes": 64 * MIB, **found}


def target() -> Device:
    """The card as predictions know it."""
    device = Budget("auto", "auto").target()
    assert device is not None
    return device


if __name__ == "__main__":
    sys.exit(main())
