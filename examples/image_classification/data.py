"""Images and labels: scikit-learn's digits, or arrays of your own."""

from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, TensorDataset, random_split


class Images(LightningDataModule):
    """Images as float32 [rows, channels, height, width], about 0 to 1, and their labels.

    Args:
        path: an .npz file with `images` [rows, height, width] or [rows, height, width, channels] (integers up to 255,
            or floats as the model takes them) and `labels` [rows]; null: the 1,797 digits that scikit-learn has.
        batch_size: the effective batch of a step.
        validation: the share of images that is held out.
    """

    def __init__(self, path: str | None = None, batch_size: int = 256, validation: float = 0.2) -> None:
        super().__init__()
        self.path, self.batch_size, self.validation = path, batch_size, validation

    def setup(self, stage: str) -> None:
        """Reads the arrays and splits them, the same way every time."""
        images, labels = self.read()
        images = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
        scaled = images / 255 if images.dtype == np.uint8 else images
        data = TensorDataset(torch.tensor(scaled, dtype=torch.float32), torch.tensor(labels).long())
        shares = [1 - self.validation, self.validation]
        self.train, self.held_out = random_split(data, shares, torch.Generator().manual_seed(0))

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """Images and labels."""
        if self.path is not None:
            with np.load(self.path) as arrays:
                return arrays["images"], arrays["labels"]
        from sklearn.datasets import load_digits

        digits: Any = load_digits()
        return digits.images / 16, digits.target

    def train_dataloader(self) -> DataLoader:
        """In a new order every epoch."""
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """The held-out images."""
        return DataLoader(self.held_out, self.batch_size)
