"""Runs a script of this folder on two gloo ranks and gives what rank 0 saved."""

from pathlib import Path
from typing import Any

import torch

from tests.processes import LIMIT_SECONDS, Ran, run_on_ranks


def two_ranks(script: str, folder: Path, *arguments: str, limit: float = LIMIT_SECONDS) -> dict[str, Any]:
    path = folder / "found.pt"
    done = launched(script, str(path), *arguments, limit=limit)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(path)


def launched(script: str, *arguments: str, limit: float = LIMIT_SECONDS) -> Ran:
    return run_on_ranks(f"tests.distributed.{script}", *arguments, limit=limit)
