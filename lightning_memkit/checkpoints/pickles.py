"""Checkpoints that `torch.save` wrote, read without running anything that stands in them."""

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from lightning_memkit.checkpoints.errors import CheckpointError


def read_torch_file(path: Path, map_location: Any = "cpu") -> Any:
    """What `torch.save` wrote, under ``weights_only=True``; tensors are a private map of the file.

    Raises:
        CheckpointError: it can't be read without running code, or not at all.
    """
    try:
        mapped = _is_zip(path) or None  # older files are copied into memory
        if mapped:
            _refuse_unpacking(path)
        return torch.load(path, map_location=map_location, weights_only=True, mmap=mapped)
    except Exception as error:  # of whatever kind: torch reads a stray file as instructions
        raise CheckpointError(_reason(path, error)) from error


def _is_zip(path: Path) -> bool:
    try:
        return zipfile.is_zipfile(path)
    except Exception:  # a damaged end of the archive
        return False


def _refuse_unpacking(path: Path) -> None:
    """Raise for an archive whose entries are larger than it is: torch stores them as they are."""
    with zipfile.ZipFile(path) as archive:
        declared = sum(entry.file_size for entry in archive.infolist())
    if declared > path.stat().st_size:
        raise ValueError(f"its entries would take {declared:,} bytes")


def _reason(path: Path, error: Exception) -> str:
    # torch wraps whatever goes wrong in an UnpicklingError; only some of them mean that the file asks for code.
    lines = [line.strip() for line in str(error).splitlines()]
    # "Unsupported operand" is what a text file is to it, too.
    words = ("nsupported", "not an allowed") if _is_zip(path) else ("nsupported global", "not an allowed")
    asks = next((line for line in lines if any(word in line for word in words)), None)
    if isinstance(error, pickle.UnpicklingError) and asks is not None:
        return (
            f"{path} can't be read with weights_only=True: {asks} It holds more than tensors and primitives; nothing "
            "of it was run. If you trust the file, load it with torch.load(..., weights_only=False), drop what is no "
            "data, and save it again."
        )
    return (
        f"{path} is no checkpoint that torch can read ({type(error).__name__}); it may be cut off, or be a file of "
        "another kind. Load another checkpoint, or copy this one again."
    )
