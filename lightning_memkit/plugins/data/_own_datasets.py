"""The kinds of sources for documents, and the data sets of any LightningDataModule's loaders."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypedDict

import lightning.pytorch as pl

_LOADERS = {
    "train": "train_dataloader",
    "validation": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}
_SHARES = {
    "fit": ("train", "validation"),
    "validate": ("validation",),
    "test": ("test",),
    "predict": ("predict",),
}


class Shares(TypedDict, total=False):
    """A source for each split of the documents."""

    train: Any
    validation: Any
    test: Any
    predict: Any


# `Shares` must come before datamodules: LightningCLI tries the types in this order. `Path` is what makes the path of a
# file a value: of a type that may be a class jsonargparse reads the file as a config, unless it may be a path, too.
Source = (
    str | Path | Shares | pl.LightningDataModule | Sequence[Any] | Iterable[Any] | Callable[[], Iterable[Any]]
)


def own_datasets(
    module: pl.LightningDataModule, trainer: pl.Trainer | None, stage: str | None
) -> dict[str, Any]:
    """Set the module up and return its loaders' data sets by split, without their samplers and collating.

    Args:
        module: The data module to read.
        trainer: Attached to the module, which may read it; None outside training.
        stage: As in ``setup``; None stands for all stages.

    Raises:
        ValueError: A loader method returns several loaders, or one without a data set.
    """
    if trainer is not None:
        module.trainer = trainer
    found = {}
    for each in _SHARES if stage is None else (stage,):
        module.setup(each)
        for share in _SHARES[each]:
            name = _LOADERS[share]
            if getattr(type(module), name) is not getattr(pl.LightningDataModule, name):
                loader = getattr(module, name)()
                if loader is not None and not (isinstance(loader, list) and not loader):
                    found[share] = _dataset(loader, f"{type(module).__name__}.{name}()")
    return found


def _dataset(loader: Any, name: str) -> Any:
    if not hasattr(loader, "dataset"):
        raise ValueError(
            f"{name} gives {type(loader).__name__}, which has no one data set to pack; let it return one DataLoader, "
            "or give the data sets themselves: source={'train': ..., 'validation': ...}."
        )
    return loader.dataset
