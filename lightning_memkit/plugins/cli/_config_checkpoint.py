"""The checkpoint that a config resumes from: refused while nothing is built yet, and read where LightningCLI can't."""

import re
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lightning_memkit.checkpoints import files, streamed
from lightning_memkit.checkpoints.atomic import recover
from lightning_memkit.checkpoints.errors import CheckpointError

_LOOKED_UP = re.compile(r"best|last|hpc|registry.*|\w+://.*")  # what Lightning finds
_ZIP = b"PK\x03\x04"  # a file of torch.save begins so


@contextmanager
def readable_by_torch(config: Any) -> Iterator[str | None]:
    """Point the config's `ckpt_path` at a small torch file with the streamed checkpoint's hyperparameters.

    Yields:
        The original path if it was replaced, else None.

    Raises:
        FileNotFoundError: the checkpoint is not there.
        CheckpointError: it was cut off.
    """
    options = config.get(config.get("subcommand") or "", {})
    path = options.get("ckpt_path")
    if path and not _LOOKED_UP.fullmatch(str(path)):
        _refuse_unreadable(Path(path))
    if not path or not Path(path).is_file() or not streamed.is_safetensors(Path(path)):
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="memkit-") as folder:
        small = Path(folder, "hyperparameters.ckpt")
        torch.save({"hyper_parameters": files.load(path).get("hyper_parameters", {})}, small)
        options["ckpt_path"] = str(small)
        yield path


def _refuse_unreadable(path: Path) -> None:
    """Refuse a path where nothing is, and a file that torch can't read since it was cut off; costs its last bytes."""
    recover(path)
    if not path.exists():
        raise FileNotFoundError(
            f"ckpt_path={str(path)!r} is not there: give the path of a checkpoint{_newest(path)}."
        )
    if path.is_file() and _was_cut_off(path):
        size = f"{path.stat().st_size:,} bytes"
        raise CheckpointError(
            f"{path} is damaged and can't be loaded: it was cut off after {size}{_newest(path)}."
        )


def _was_cut_off(path: Path) -> bool:
    """Whether it begins as a file of torch.save does, whose directory of contents is at the end, and has none."""
    with path.open("rb") as file:
        return file.read(len(_ZIP)) == _ZIP and not zipfile.is_zipfile(path)


def _newest(path: Path) -> str:
    """The youngest checkpoint beside it that was not cut off."""
    whole = [
        one for one in path.parent.glob("*.ckpt") if one != path and not (one.is_file() and _was_cut_off(one))
    ]
    if not whole:
        return ""
    return f"; the newest other one beside it is {max(whole, key=lambda one: one.stat().st_mtime)}"
