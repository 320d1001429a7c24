"""Whether there is a card, and how the tests that ask one run without: on the CPU, small, to exercise their logic.

`MEMKIT_GPU_TESTS_ON=cpu pytest tests/gpu` runs all but what only CUDA has.
"""

import json
import os
import subprocess
import sys
import warnings
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
VARIABLE = "MEMKIT_GPU_TESTS_ON"


def on_cpu() -> bool:
    """Whether tests marked `gpu` are to run on the CPU."""
    return os.environ.get(VARIABLE) == "cpu"


def why_skipped() -> str | None:
    """Why tests marked `gpu` can't run here; initialises nothing."""
    if on_cpu() or _cards():
        return None
    return f"needs a CUDA device ({VARIABLE}=cpu runs what can run without)"


@cache
def _cards() -> int:
    # Not `is_available`, which initialises the driver's runtime and so breaks forks; this asks NVML first.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.cuda.device_count()


def needs_cuda(reason: str) -> None:
    """Skip the rest of a test whose subject exists only on CUDA."""
    if on_cpu():
        pytest.skip(f"only on CUDA: {reason}")


def needs_package(*names: str) -> Any:
    """The first of these packages; skips the rest of a test where one is missing, and says which wheels to carry."""
    try:
        return [import_module(name) for name in names][0]
    except ImportError as error:
        wheels = " ".join(names)
        pytest.skip(f"{error}; carry {wheels}: scripts/first_card.sh --wheels DIR, see docs/gpu.md")


def sized(on_gpu: T, on_the_cpu: T) -> T:
    """The size for a card, or the small one for the CPU."""
    return on_the_cpu if on_cpu() else on_gpu


def accelerator() -> str:
    """The Trainer's, which would otherwise choose by itself."""
    return "cpu" if on_cpu() else "cuda"


def script(name: str, *arguments: str, **environment: str) -> dict[str, Any]:
    """What a script of this folder prints as its last line, in JSON; in a process that has used no CUDA yet.

    An empty value removes the variable.
    """
    given = {
        key: value for key, value in (os.environ | environment).items() if value or key not in environment
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"tests.gpu.{name}", *arguments],
        cwd=ROOT,
        env=given,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])
