"""Runs a script of this folder on two gloo ranks and gives what rank 0 saved."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

LIMIT_SECONDS = 480  # of a whole sweep on a busy machine; a hang ends after 60, by its own alarm


def two_ranks(script: str, folder: Path, *arguments: str) -> dict[str, Any]:
    path = folder / "found.pt"
    done = launched(script, str(path), *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(path)


def launched(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone",
               "-m", f"tests.distributed.{script}", *arguments]  # fmt: skip
    root = Path(__file__).parents[2]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=LIMIT_SECONDS)
