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
_PICKLE = b"\x80"  # and one of before torch 1.6 so
_SHARDS = (".metadata", "checkpoint")  # of which a folder of shards has one: torch's, or DeepSpeed's
_VERSION = "pytorch-lightning_version"  # which every checkpoint of a Trainer has


@contextmanager
def readable_by_torch(config: Any) -> Iterator[str | None]:
    """Point the config's `ckpt_path` at a small torch file with the streamed checkpoint's hyperparameters.

    Yields:
        The original path if it was replaced, else None.

    Raises:
        FileNotFoundError: the checkpoint is not there.
        CheckpointError: it was cut off, or is no checkpoint of a Trainer.
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
    if lacks := _lacks(path):
        raise CheckpointError(f"ckpt_path={str(path)!r} is no checkpoint of a Trainer: {lacks}.")


def _lacks(path: Path) -> str:
    """What this is instead of a checkpoint of a Trainer; empty if it is one, or only loading it can tell."""
    if path.is_dir():
        within = _newest(path / "none", "it holds")
        is_sharded = any((path / name).exists() for name in _SHARDS)
        return "" if is_sharded else f"it is a folder without {_SHARDS[0]!r}{within}"
    with path.open("rb") as file:
        first = file.read(len(_ZIP))
    if first != _ZIP and not first.startswith(_PICKLE):
        is_known = streamed.is_safetensors(path)
        return "" if is_known else f"neither torch.save nor memkit wrote it{_newest(path)}"
    try:
        found = torch.load(path, map_location="cpu", mmap=first == _ZIP, weights_only=True)
    except Exception:  # it needs classes of the user's, as Lightning says when it loads it
        return ""
    if isinstance(found, dict) and _VERSION in found:
        return ""
    return f"it has no {_VERSION!r}; weights alone are loaded by the callback InitialWeights({str(path)!r})"


def _was_cut_off(path: Path) -> bool:
    """Whether it begins as a file of torch.save does, whose directory of contents is at the end, and has none."""
    with path.open("rb") as file:
        return file.read(len(_ZIP)) == _ZIP and not zipfile.is_zipfile(path)


def _newest(path: Path, words: str = "the newest other one beside it is") -> str:
    """The youngest checkpoint beside it that was not cut off."""
    whole = [
        one for one in path.parent.glob("*.ckpt") if one != path and not (one.is_file() and _was_cut_off(one))
    ]
    if not whole:
        return ""
    return f"; {words} {max(whole, key=lambda one: one.stat().st_mtime)}"
