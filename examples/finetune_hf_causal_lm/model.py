"""Any causal language model of the transformers package in an ordinary LightningModule."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel


class CausalLM(LightningModule):
    """Predicts the next token.

    Args:
        config: of the model to build: `{model_type: llama, hidden_size: 256}`, or the folder or hub name of a model.
        weights: folder or hub name of a model to load, config and weights; null leaves `config`'s random ones.
        prepare: called with the model once it is built, such as what keeps packed documents apart.
        optimizer: from parameters to an optimizer.
        warmup_steps: optimizer steps with a growing learning rate, before it falls on a line to zero.
    """

    def __init__(
        self,
        config: str | dict[str, Any] = "gpt2",
        weights: str | None = None,
        prepare: Callable[[PreTrainedModel], Any] | None = None,
        optimizer: OptimizerCallable = torch.optim.AdamW,
        warmup_steps: int = 10,
    ) -> None:
        super().__init__()
        self.optimizer, self.warmup_steps = optimizer, warmup_steps
        self.model = load(weights) if weights else build(config)
        if prepare is not None:
            prepare(self.model)

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Tensor:
        """The model's own loss: the mean over labels; -100 (questions, padding) don't count."""
        loss = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True, batch_size=len(batch["input_ids"]))
        return loss

    def validation_step(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        """The loss of held-out documents."""
        loss = self.model(**batch).loss
        labels = int((batch["labels"] != -100).sum())
        self.log("val_loss", loss, prog_bar=True, batch_size=labels)

    def configure_optimizers(self) -> Any:
        """The optimizer of the config, with a warm-up and a fall to zero."""
        optimizer = self.optimizer(self.parameters())
        steps = int(self.trainer.estimated_stepping_batches)

        def share(step: int) -> float:
            return min(
                (step + 1) / (self.warmup_steps + 1), (steps - step) / max(1, steps - self.warmup_steps)
            )

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def build(config: str | dict[str, Any]) -> Any:
    """The model of a config, with random weights."""
    if isinstance(config, str):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config))
    options = dict(config)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(options.pop("model_type"), **options))


def load(weights: str) -> Any:
    """The model of a folder or hub name with its weights; the run's precision decides their dtype."""
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    return model.train()  # it comes in eval mode, without dropout, and Lightning leaves it so
