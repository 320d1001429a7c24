"""Mixtral of the transformers package, built from a config: no weights are downloaded."""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM


class MixtralLM(LightningModule):
    """Predicts the next token.

    Args:
        config: of `MixtralConfig`, such as `{hidden_size: 256, num_local_experts: 8}`.
        learning_rate: AdamW's.
    """

    def __init__(self, config: dict[str, Any] | None = None, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.model: Any = MixtralForCausalLM(MixtralConfig(**(config or {})))

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Tensor:
        """The model's own loss; labels of -100 don't count."""
        loss = self.model(
            **{name: batch[name] for name in self.inputs if name in batch}, use_cache=False
        ).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    inputs = ("input_ids", "labels", "position_ids")

    def configure_optimizers(self) -> Any:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
