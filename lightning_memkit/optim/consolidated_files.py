"""Consolidation from disk to disk: a checkpoint file, or a sharded folder of several ranks, becomes one file."""

import io
import warnings
from collections.abc import Iterable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_memkit.checkpoints import files, streamed
from lightning_memkit.checkpoints.atomic import new_file
from lightning_memkit.checkpoints.documents import encode
from lightning_memkit.checkpoints.sharded import gather, is_sharded, load_rest
from lightning_memkit.optim.consolidate import NAMES_KEY, consolidate_checkpoint
from lightning_memkit.utilities.errors import NoEffectWarning
from lightning_memkit.utilities.progress import ProgressBar

_SAFETENSORS = ".safetensors"  # a target with this suffix holds weights alone
_OF_TRAINING = ("optimizer_states", "lr_schedulers", "callbacks", "loops")
_OPTIMIZER = "optimizer_"  # Lightning's prefix for an optimizer's states in a folder, before its number


def consolidate_file(
    source: str | Path,
    target: str | Path,
    *,
    overwrite: bool = False,
    weights_only: bool = False,
    keep_dtypes: bool = False,
) -> Path:
    """`consolidate_checkpoint` from file or sharded folder to one file that plain Lightning loads.

    The target appears whole or not at all. The source is read with ``weights_only=True``; a file is mapped
    into memory, not copied, and a folder is gathered in memory. Needs memory for the result (4 bytes a weight
    and 8 for AdamW's states), plus the size of the source if it is a folder.

    Args:
        source: what `Trainer.save_checkpoint` wrote: Lightning's file, a streamed one or a sharded folder.
        target: the file to write; one named `*.safetensors` holds the weights alone, for any reader of the format.
        overwrite: replace a target that exists.
        weights_only: leave out everything that only resuming needs.
        keep_dtypes: keep bfloat16 tensors and their low halves, to continue training in bfloat16.

    Raises:
        FileNotFoundError: no such source, or no such folder for the target.
        FileExistsError: the target exists and ``overwrite`` is False.
        ValueError: the source is no checkpoint that can be read or consolidated.
    """
    source, target = Path(source), Path(target)
    _refuse_places(source, target, overwrite)
    plain = target.suffix == _SAFETENSORS
    weights_only = weights_only or plain
    checkpoint = read_checkpoint(source, states=not (weights_only and keep_dtypes))
    changes = weights_only or is_sharded(source) or streamed.is_safetensors(source)
    if keep_dtypes:
        if not changes:
            warnings.warn(
                f"keep_dtypes=True leaves {source} as it is: it is one file of Lightning's already. Copy it, or drop "
                "the option for float32.",
                NoEffectWarning,
                stacklevel=2,
            )
    elif not changes or _holds_bfloat16(checkpoint):
        checkpoint = consolidate_checkpoint(checkpoint)
    if weights_only:
        checkpoint = _without_training(checkpoint)
    with new_file(target) as file:
        if plain:
            document = encode({"state_dict": checkpoint["state_dict"]})
            streamed.write_tensors(document.tensors, document.aliases, file)
        else:
            with ProgressBar(f"writing {target.name}", _bytes_of(checkpoint), "bytes") as bar:
                buffered = io.BufferedWriter(_Told(file, bar))
                torch.save(checkpoint, buffered)
                buffered.flush()
                buffered.detach()
    return target


class _Told(io.RawIOBase):
    """A file that advances a progress bar by the bytes written to it."""

    def __init__(self, file: Any, bar: ProgressBar) -> None:
        self._file, self._bar = file, bar

    def writable(self) -> bool:
        """True."""
        return True

    def write(self, data: Any) -> int:
        """Write to the file and advance the bar."""
        written = self._file.write(data)
        self._bar.advance(written)
        return written


def _bytes_of(checkpoint: Mapping[str, Any]) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(dict(checkpoint)) if isinstance(leaf, Tensor))


def read_checkpoint(source: Path, states: bool = True) -> Mapping[str, Any]:
    """Read a Lightning checkpoint, from a file or a sharded folder, as one nested dict.

    Args:
        source: the file or folder.
        states: whether to read the optimizers' states from a folder, too.
    """
    if source.is_dir():
        return _gathered(source, states)
    checkpoint = files.load(source)
    if not isinstance(checkpoint, Mapping):
        raise ValueError(
            f"{source} holds a {type(checkpoint).__name__}, not a checkpoint; give a file that "
            "Trainer.save_checkpoint wrote."
        )
    return checkpoint


def _gathered(folder: Path, states: bool) -> dict[str, Any]:
    if not is_sharded(folder):
        raise ValueError(
            f"{folder} is a folder, but no sharded checkpoint (it has no .metadata); give the folder or file that "
            "Trainer.save_checkpoint wrote."
        )
    shares = gather(folder, lambda name: states or not name.startswith(_OPTIMIZER))
    checkpoint = {**load_rest(folder), **shares}
    if states:
        optimizers: list[dict[str, Any]] = []
        for number in count():
            if f"{_OPTIMIZER}{number}" not in checkpoint:
                break
            optimizers.append(_numbered(checkpoint.pop(f"{_OPTIMIZER}{number}")))
        checkpoint["optimizer_states"] = optimizers
    return checkpoint


def _numbered(saved: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict with numbered parameters, as plain optimizers save it; sharded ones use names."""
    groups = saved["param_groups"]
    names = [name for group in groups for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    return {
        **saved,
        "state": {numbers[name]: state for name, state in saved.get("state", {}).items()},
        "param_groups": [
            {**group, "params": [numbers[name] for name in group["params"]]} for group in groups
        ],
    }


def _without_training(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in checkpoint.items()
        if key not in _OF_TRAINING and not (isinstance(value, Mapping) and NAMES_KEY in value)
    }


def _refuse_places(source: Path, target: Path, overwrite: bool) -> None:
    if not source.exists():
        raise FileNotFoundError(f"{source} does not exist; give the path of a checkpoint.")
    if target.is_dir():
        raise IsADirectoryError(f"{target} is a folder; give the name of a file to write.")
    if target.exists() and not overwrite:
        raise FileExistsError(
            f"{target} exists and would be replaced; choose another name, or write overwrite=True."
        )
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target.parent} is no folder; create it first.")


def _holds_bfloat16(checkpoint: Mapping[str, Any]) -> bool:
    return any(
        tensor.dtype == torch.bfloat16 for tensor in _tensors(checkpoint.get("state_dict", {}).values())
    )


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    return (value for value in values if isinstance(value, Tensor))
