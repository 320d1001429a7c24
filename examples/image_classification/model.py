"""Image classification in an ordinary LightningModule: a convolutional network, a vision transformer, or your own."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy


class ImageClassifier(LightningModule):
    """Predicts the class of an image.

    Args:
        net: from images [rows, channels, height, width] to logits [rows, classes].
        classes: how many there are.
        learning_rate: AdamW's, on a cosine to zero.
    """

    def __init__(self, net: nn.Module, classes: int = 10, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.net, self.learning_rate = net, learning_rate
        self.accuracy = MulticlassAccuracy(classes, average="micro")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy, a mean over images."""
        images, labels = batch
        loss = F.cross_entropy(self.net(images).float(), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Accuracy on held-out images."""
        images, labels = batch
        self.accuracy(self.net(images).float(), labels)
        self.log("val_accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> Any:
        """AdamW on a cosine."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Block(nn.Module):
    """Two convolutions with batch normalization, added to what comes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Features [rows, width, height, width of the image] to the next block's."""
        return F.relu(x + self.layers(x))


class ConvNet(nn.Sequential):
    """A residual network: a convolution, blocks, the mean over places."""

    def __init__(self, channels: int = 1, width: int = 64, blocks: int = 6, classes: int = 10) -> None:
        super().__init__(
            nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Sequential(*(Block(width) for _ in range(blocks))),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes),
        )  # fmt: skip


class ViT(nn.Module):
    """The vision transformer of the transformers package: a folder or hub name with its weights, or a config."""

    def __init__(self, weights: str | None = None, config: dict[str, Any] | None = None) -> None:
        super().__init__()
        from transformers import ViTConfig, ViTForImageClassification

        if weights is None:
            self.vit: Any = ViTForImageClassification(ViTConfig(**(config or {})))
        else:
            options = {**(config or {}), "ignore_mismatched_sizes": True}  # a head of other classes
            self.vit = ViTForImageClassification.from_pretrained(weights, **options).train()

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        return self.vit(images).logits
