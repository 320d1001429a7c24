"""Small models for the tests: a plain transformer, a CNN with BatchNorm, transformers models from configs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

VOCABULARY = 128
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
CAUSAL = {
    "LlamaForCausalLM": {"num_key_value_heads": 2, "attention_dropout": 0.1},
    "Qwen3ForCausalLM": {"num_key_value_heads": 2, "head_dim": 8},
    "Gemma3ForCausalLM": {"num_key_value_heads": 2, "head_dim": 8},
    "Phi3ForCausalLM": {"pad_token_id": 0, "resid_pdrop": 0.1},
    "GPTNeoXForCausalLM": {"hidden_dropout": 0.1},
    "MistralForCausalLM": {"num_key_value_heads": 2, "attention_dropout": 0.1},
    "OPTForCausalLM": {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.1},
    "MambaForCausalLM": {},
    "Qwen3MoeForCausalLM": {
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "MixtralForCausalLM": {"num_local_experts": 4, "num_key_value_heads": 2},
    "GPT2LMHeadModel": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "BertForMaskedLM": {"hidden_dropout_prob": 0.1},
}


def transformers_model(name: str, **options: Any) -> nn.Module:
    import transformers

    cls = getattr(transformers, name)
    config = cls.config_class(**{**SMALL, **CAUSAL[name], **options})
    config.use_cache = False
    return cls(config)


def checkpointed_by_itself(model: Any) -> None:
    """Turn on a model's own checkpointing, whose method earlier transformers name otherwise."""
    (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()


def lora_model(
    *,
    dropout: float = 0.0,
    layers: list[int] | None = None,
    attention_dropout: float = 0.1,
    quantized: Callable[[nn.Module], object] = lambda _: None,
) -> nn.Module:
    """A Llama of which only LoRA's matrices are trained."""
    import transformers

    peft = pytest.importorskip("peft")
    options = {"num_key_value_heads": 2, "attention_dropout": attention_dropout, "use_cache": False}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **options))
    quantized(model)
    adapters = peft.LoraConfig(
        r=4,
        lora_dropout=dropout,
        target_modules=["q_proj", "v_proj", "down_proj"],
        layers_to_transform=layers,
        init_lora_weights=False,
    )
    return peft.get_peft_model(model, adapters)


def in_4_bits(model: nn.Module) -> None:
    """The matrices of the layers as bitsandbytes' NF4."""
    nn_4_bits = pytest.importorskip("bitsandbytes").nn
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            path, _, key = name.rpartition(".")
            new = nn_4_bits.Linear4bit(module.in_features, module.out_features, bias=False, quant_type="nf4")
            new.weight = nn_4_bits.Params4bit(module.weight.data, requires_grad=False, quant_type="nf4")
            setattr(model.get_submodule(path), key, new.to("cpu"))


def in_int8(model: nn.Module) -> None:
    """The matrices of the layers as torchao's int8, a tensor that stands for several."""
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model.get_submodule("model.layers"), quantization.Int8WeightOnlyConfig())


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.mix(self.norm(x)))
        return x if scale is None else x * scale


class Stack(nn.Module):
    """An embedding, repeated blocks with a keyword argument, a head."""

    def __init__(self, width: int = 32, depth: int = 4, dropout: float = 0.2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        scale = torch.full((1,), 0.5, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, scale=scale)
        return self.head(x)


class ConvBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Stage(nn.Module):
    def __init__(self, channels: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(ConvBlock(channels) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class ConvNet(nn.Module):
    """Two stages of residual blocks with BatchNorm; the stages themselves repeat, too."""

    def __init__(self, channels: int = 8, depth: int = 2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3)
        self.stages = nn.ModuleList(Stage(channels, depth) for _ in range(2))
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean(dim=(2, 3)))
