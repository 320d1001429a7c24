"""LoRA over frozen weights of 8 or 4 bits, in an ordinary LightningModule: transformers, bitsandbytes, peft."""

from collections.abc import Callable, Mapping
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig


class QuantizedLoRA(LightningModule):
    """Predicts the next token; learns low-rank additions to frozen weights.

    Args:
        weights: folder or hub name of a causal language model; null: `config`'s random weights.
        config: such as `{model_type: llama, hidden_size: 256}`.
        bits: of a frozen weight: 8, 4 or 16. Embeddings, norms and the head keep 16.
        lora: of peft's `LoraConfig`, such as `{r: 16, target_modules: all-linear}`.
        prepare: called with the model once it is built, such as what keeps packed documents apart.
        learning_rate: AdamW's.
        adapter: a folder for what was learned, written when training ends; peft reads it.
    """

    def __init__(
        self,
        weights: str | None = None,
        config: dict[str, Any] | None = None,
        bits: Literal[4, 8, 16] = 4,
        lora: dict[str, Any] | None = None,
        prepare: Callable[[nn.Module], Any] | None = None,
        learning_rate: float = 2e-4,
        adapter: str | None = None,
    ) -> None:
        super().__init__()
        self.learning_rate, self.adapter = learning_rate, adapter
        base = load(weights, bits) if weights else build(config or {}, bits)
        options = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear", **(lora or {})}
        self.model: PeftModel = get_peft_model(base, LoraConfig(**options), autocast_adapter_dtype=False)  # type: ignore
        if prepare is not None:
            prepare(self)

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Tensor:
        """The model's own loss: the mean over labels; -100 (questions, padding) don't count."""
        loss = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True, batch_size=len(batch["input_ids"]))
        return loss

    def validation_step(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        """The loss of held-out documents."""
        labels = int((batch["labels"] != -100).sum())
        self.log("val_loss", self.model(**batch).loss, prog_bar=True, batch_size=labels)

    def configure_optimizers(self) -> Any:
        """AdamW for what is not frozen."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=self.learning_rate, fused=True)

    def on_train_end(self) -> None:
        """Writes the adapter."""
        if self.adapter is not None and self.trainer.is_global_zero:
            self.model.save_pretrained(self.adapter, save_embedding_layers=False)


def load(weights: str, bits: int) -> Any:
    """The model of a folder or hub name, quantized file by file on the device that tensors are made on now."""
    quantization = {
        4: BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.bfloat16,
            bnb_4bit_use_double_quant=True,
        ),
        8: BitsAndBytesConfig(load_in_8bit=True),
        16: None,
    }[bits]
    model = AutoModelForCausalLM.from_pretrained(
        weights,
        quantization_config=quantization,
        dtype=torch.bfloat16,
        device_map={"": torch.get_default_device()},
    )
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            # On CPUs the first evaluation would pack the weights for good in a way that has no gradient.
            setattr(layer, "support_avx512bf16_for_cpu", False)  # noqa: B010
    return model.train()  # it comes in eval mode, and Lightning leaves it so


def build(config: dict[str, Any], bits: int) -> Any:
    """The model of a config, with random weights, quantized as a saved one is."""
    options = dict(config)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(options.pop("model_type", "llama"), **options)
    )
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load(folder, bits)
