"""Where in a config a class belongs."""

from difflib import get_close_matches
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import CheckpointIO, ClusterEnvironment, LayerSync, Precision
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy
from torch.optim import Optimizer

import lightning_memkit

_PLACES: tuple[tuple[str, str, tuple[type, ...]], ...] = (
    ("callback", "trainer.callbacks", (Callback,)),
    ("plugin", "trainer.plugins", (Precision, CheckpointIO, ClusterEnvironment, LayerSync)),
    ("strategy", "trainer.strategy", (Strategy,)),
    ("logger", "trainer.logger", (Logger,)),
    ("profiler", "trainer.profiler", (Profiler,)),
    ("optimizer", "optimizer", (Optimizer,)),
    ("model", "model", (LightningModule,)),
    ("data module", "data", (LightningDataModule,)),
)
_OURS, _ALIKE = "lightning_memkit.", 0.75


def belongs_elsewhere(key: str, path: str, cls: Any) -> str:
    """Under which key a class belongs; empty if it is of no kind that a config has, or stands there.

    Args:
        key: under which it stands.
        path: its class path.
        cls: the class.
    """
    for kind, place, bases in _PLACES if isinstance(cls, type) else ():
        if issubclass(cls, bases):
            return f"{path} is a {kind} and belongs under {place}" if place != key else ""
    return ""


def takes_classes(key: str) -> bool:
    """Whether a config names classes under a key."""
    return any(key == place for _, place, _ in _PLACES)


def nearest_of_ours(path: str) -> str:
    """The public name of memkit that a path or a name may have meant, with its place; empty if none is near."""
    name = path.removeprefix(_OURS)
    known = lightning_memkit.__all__
    close = [name] if name in known else get_close_matches(name, known, n=1, cutoff=_ALIKE)
    return f"{_OURS}{close[0]}" if close else ""
