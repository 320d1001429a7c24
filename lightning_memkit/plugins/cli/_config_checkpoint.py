"""Let LightningCLI read the hyperparameters of a streamed checkpoint, which it would pass to torch.load."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lightning_memkit.checkpoints import files, streamed


@contextmanager
def readable_by_torch(config: Any) -> Iterator[str | None]:
    """Point the config's `ckpt_path` at a small torch file with the streamed checkpoint's hyperparameters.

    Yields:
        The original path if it was replaced, else None.
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
