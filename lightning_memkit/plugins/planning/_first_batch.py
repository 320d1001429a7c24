"""The batch that a plan or prediction is for, from what is at hand: a batch, a loader, or a data module."""

import os
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_memkit.data.batching.random_numbers import GlobalNumbers, generators_of


def batch_of(data: Any) -> Any:
    """The batch itself, or the first one of a training loader or data module; random states stay as they are.

    A data module is prepared and set up for `fit`, as the Trainer will do once more.

    Raises:
        TypeError: it is the name of a file.
        ValueError: the data has no batch.
    """
    if isinstance(data, (str, os.PathLike)):
        raise TypeError(
            f"batch={os.fspath(data)!r} is a name, not a batch: give what a loader yields, the loader, or a "
            "LightningDataModule; for a file of text PackedDataModule(source=..., tokenizer=..., context=...)."
        )
    return first_batch(data) if isinstance(data, (DataLoader, CombinedLoader, LightningDataModule)) else data


def first_batch(source: DataLoader | CombinedLoader | LightningDataModule | LightningModule) -> Any:
    """The first batch that the Trainer would train on; see `batch_of`.

    Raises:
        ValueError: there is none.
    """
    numbers, states = GlobalNumbers(), list[tuple[torch.Generator, Tensor]]()
    try:
        loaders: Any = source
        if isinstance(source, (LightningDataModule, LightningModule)):
            source.prepare_data()
            source.setup("fit")
            loaders = source.train_dataloader()
        combined = (
            loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "max_size_cycle")
        )
        states += [(one, one.get_state()) for loader in combined.flattened for one in _generators(loader)]
        batch, _, _ = next(iter(combined))
    except StopIteration:
        name = type(source).__name__
        raise ValueError(
            f"The training data of {name} gives no batch to plan for; give one with data."
        ) from None
    finally:
        numbers.restore()
        for generator, state in states:
            generator.set_state(state)
    return batch


def _generators(loader: Any) -> list[torch.Generator]:
    """Those that an iteration draws its order from."""
    return generators_of(loader.sampler, loader.generator) if isinstance(loader, DataLoader) else []
