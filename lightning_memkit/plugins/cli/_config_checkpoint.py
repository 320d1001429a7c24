"""What LightningCLI reads of a checkpoint before anything is built: the hyperparameters, by torch.load."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lightning_memkit.checkpoints import files, streamed


@contextmanager
def readable_by_torch(config: Any) -> Iterator[str | None]:
    """Let the config's `ckpt_path` be a file that torch reads, with the hyperparameters of the one it names.

    Gives the path that was there, where it was replaced.
    """
    options = config.get(config.get("subcommand") or "", {})
    path = options.get("ckpt_path")
    if not path or not Path(path).is_file() or not streamed.is_safetensors(Path(path)):
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="memkit-") as folder:
        small = Path(folder, "hyperparameters.ckpt")
        torch.save({"hyper_parameters": files.load(path).get("hyper_parameters", {})}, small)
        options["ckpt_path"] = str(small)
        yield path
