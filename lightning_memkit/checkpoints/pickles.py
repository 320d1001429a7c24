"""Read checkpoints of `torch.save` without running code in them."""

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from lightning_memkit.checkpoints.errors import CheckpointError
from lightning_memkit.checkpoints.names import readable_name


def read_torch_file(path: Path, map_location: Any = "cpu") -> Any:
    """Read a file of `torch.save` with ``weights_only=True``; tensors are a private memory map of the file.

    Raises:
        CheckpointError: it can't be read without running code, or not at all.
    """
    try:
        mapped = _is_zip(path) or None  # older formats can't be mapped
        if mapped:
            _refuse_unpacking(path)
        with readable_name(path) as name:
            return torch.load(name, map_location=map_location, weights_only=True, mmap=mapped)
    except Exception as error:  # any kind: torch reads any file as instructions
        raise CheckpointError(_reason(path, error)) from error


def _is_zip(path: Path) -> bool:
    try:
        return zipfile.is_zipfile(path)
    except Exception:  # the end of the archive is damaged
        return False


def _refuse_unpacking(path: Path) -> None:
    """Raise for an archive whose entries are larger than itself: torch stores entries uncompressed."""
    with zipfile.ZipFile(path) as archive:
        declared = sum(entry.file_size for entry in archive.infolist())
    if declared > path.stat().st_size:
        raise ValueError(f"its entries would take {declared:,} bytes")


def _reason(path: Path, error: Exception) -> str:
    # torch wraps every failure in an UnpicklingError; only some mean that the file needs code.
    lines = [line.strip() for line in str(error).splitlines()]
    # For a text file the message is "Unsupported operand", so match less if it is no zip.
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
