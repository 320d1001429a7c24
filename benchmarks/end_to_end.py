"""Llamas of 1 and 8 billion parameters trained on a GPU: peak and tokens a second of memkit and of others.

The same effective batch through plain Lightning (`bf16-mixed`, fused AdamW), memkit (`PureBF16Precision`, activation
checkpointing and `MemoryBudget`, which finds the micro-batch) and Hugging Face's Trainer with the flags that its
docs give for memory (bf16, gradient checkpointing; fused AdamW, or AdamW of 8 bits where bitsandbytes is installed).
Each trains in a process of its own, from random weights. `fits` is 0 where it runs out of memory. Hugging Face's
rows and those of 8 billion parameters are not yet verified on a GPU.
"""

import json
import subprocess
import sys
from dataclasses import asdict
from functools import partial

from benchmarks.__main__ import main_of
from benchmarks._end_to_end_run import WAYS, EndToEnd
from benchmarks._gpu_rows import GpuRow, SkipRow, Values, needs_package
from benchmarks._gpu_size import GpuSize
from benchmarks.harness import Options
from benchmarks.record import ROOT

ROWS = 4  # of the effective batch
PACKAGES = {"hugging_face": ("accelerate",), "hugging_face_8bit": ("accelerate", "bitsandbytes")}


def gpu_rows(options: Options) -> list[GpuRow]:
    """Ours and plain Lightning first; what others do with 8 billion last: they run out of memory on most cards."""
    size = GpuSize.of(options)
    smallest, *larger = size.llamas
    order = [(smallest, way) for way in ("memkit", "lightning")]
    order += [(shape, "memkit") for shape in larger]
    order += [(shape, way) for shape in size.llamas for way in WAYS if (shape, way) not in order]
    return [_row(shape, way, size.length, options) for shape, way in order]


def _row(shape: str, way: str, length: int, options: Options) -> GpuRow:
    case = EndToEnd(shape=shape, way=way, rows=ROWS, length=length, device=options.device, seed=options.seed)
    # As seen on an H200; memkit's sizing takes trials.
    needs_seconds = {"memkit": 76 if shape != "8b" else 120, "lightning": 40}.get(way, 26)
    return GpuRow(what=f"Llama {shape}, {WAYS[way]}", needs_seconds=needs_seconds, run=partial(trained, case))


def trained(case: EndToEnd) -> Values:
    """Peak and speed of a case, from a process of its own."""
    for package in PACKAGES.get(case.way, ()):
        needs_package(package)
    if case.way == "hugging_face_8bit" and case.device == "cpu":
        raise SkipRow("needs a CUDA device")
    # No session of its own: it has to end with the process that this row runs in.
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks._end_to_end_run", json.dumps(asdict(case))],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr[-400:]}")
    found: Values = json.loads(done.stdout.splitlines()[-1])
    return {
        f"{case.way}_{case.shape}_{name}" if not isinstance(value, str) else name: value
        for name, value in found.items()
    }


if __name__ == "__main__":
    raise SystemExit(main_of(__file__))
