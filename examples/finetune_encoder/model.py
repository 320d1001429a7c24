"""Text classification with an encoder of the transformers package in an ordinary LightningModule."""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy
from transformers import AutoConfig, AutoModelForSequenceClassification


class TextClassifier(LightningModule):
    """Predicts the label of a text.

    Args:
        weights: folder or hub name of an encoder; its head is made anew. null: `config`'s random weights.
        config: such as `{model_type: bert, hidden_size: 128}`; with `weights`, what to change of theirs.
        labels: how many labels there are.
        learning_rate: AdamW's, after a warm-up, then on a line to zero.
        warmup: the share of steps that is the warm-up.
    """

    def __init__(
        self,
        weights: str | None = None,
        config: dict[str, Any] | None = None,
        labels: int = 2,
        learning_rate: float = 2e-5,
        warmup: float = 0.1,
    ) -> None:
        super().__init__()
        self.learning_rate, self.warmup = learning_rate, warmup
        self.model = build({**(config or {}), "num_labels": labels}, weights)
        self.accuracy = MulticlassAccuracy(labels, average="micro")

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy, a mean over texts."""
        loss = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> None:
        """Accuracy on held-out texts."""
        self.accuracy(self.model(**batch).logits.float(), batch["labels"])
        self.log("val_accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> Any:
        """AdamW with a warm-up and a fall to zero."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
        steps = int(self.trainer.estimated_stepping_batches)
        first = max(1, int(self.warmup * steps))
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / first, (steps - step) / max(1, steps - first))
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def build(options: dict[str, Any], weights: str | None) -> Any:
    """The model of a folder or hub name, or of a config with random weights."""
    if weights is None:
        config = AutoConfig.for_model(options.pop("model_type"), **options)
        return AutoModelForSequenceClassification.from_config(config)
    options.pop("model_type", None)
    model = AutoModelForSequenceClassification.from_pretrained(weights, **options)
    return model.train()  # it comes in eval mode, without dropout, and Lightning leaves it so
