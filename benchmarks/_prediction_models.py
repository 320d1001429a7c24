"""Models whose training is predicted: transformers from configs, Lightning's demo, an MLP, CNNs, packing."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, WIDTH, LENGTH, CLASSES, IMAGE = 512, 64, 64, 10, 32
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 2 * WIDTH,
}
_GROUPED = {"num_key_value_heads": 2}
_IMAGES = {"num_labels": CLASSES}
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {**_SHAPE, **_GROUPED},
    "Qwen3ForCausalLM": {**_SHAPE, **_GROUPED, "head_dim": 16},
    "MistralForCausalLM": {**_SHAPE, **_GROUPED},
    "Gemma3ForCausalLM": {**_SHAPE, **_GROUPED, "head_dim": 16},
    "Phi3ForCausalLM": {**_SHAPE, **_GROUPED, "pad_token_id": 0},
    "GPTNeoXForCausalLM": _SHAPE,
    "OPTForCausalLM": {**_SHAPE, "ffn_dim": 2 * WIDTH, "word_embed_proj_dim": WIDTH},
    "MixtralForCausalLM": {**_SHAPE, **_GROUPED, "num_local_experts": 4},
    "Qwen3MoeForCausalLM": {
        **_SHAPE,
        **_GROUPED,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": WIDTH,
    },
    "MambaForCausalLM": {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2},
    "GPT2LMHeadModel": {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": 4},
    "BertForMaskedLM": _SHAPE,
    "T5ForConditionalGeneration": {
        "vocab_size": VOCABULARY,
        "d_model": WIDTH,
        "num_layers": 2,
        "num_heads": 4,
        "d_ff": 2 * WIDTH,
        "d_kv": 16,
        "decoder_start_token_id": 0,
    },
    "WhisperForConditionalGeneration": {
        "vocab_size": VOCABULARY,
        "d_model": WIDTH,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 2 * WIDTH,
        "decoder_ffn_dim": 2 * WIDTH,
        "num_mel_bins": 8,
        "max_source_positions": LENGTH,
        "max_target_positions": LENGTH,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
    },
    "ViTForImageClassification": {
        **{name: value for name, value in _SHAPE.items() if name != "vocab_size"},
        **_IMAGES,
        "image_size": IMAGE,
        "patch_size": 4,
    },
    "ResNetForImageClassification": {
        **_IMAGES,
        "embedding_size": 16,
        "hidden_sizes": [
            16,
            32,
            64,
        ],  # another stage would leave one pixel, of which BatchNorm takes no variance
        "depths": [1, 1, 1],
    },
    "ConvNextForImageClassification": {
        **_IMAGES,
        "hidden_sizes": [16, 32, 64, 128],
        "depths": [1, 1, 1, 1],
        "image_size": IMAGE,
        "patch_size": 2,
    },
}
# What grows with a scale, of a configuration; images, and the widths of what convolves over them, at most fourfold.
_WIDTHS = (
    "vocab_size", "hidden_size", "intermediate_size", "head_dim", "ffn_dim", "word_embed_proj_dim", "n_embd",
    "d_model", "d_ff", "d_kv", "encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size",
    "max_source_positions", "max_target_positions",
)  # fmt: skip
_OF_IMAGES = ("image_size", "embedding_size", "hidden_sizes")
_LARGEST_OF_IMAGES = 4
_UNBLOCKED = ("ResNetForImageClassification", "ConvNextForImageClassification")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model, its loss on a batch, and batches of so many samples; `has_blocks` if it can be checkpointed."""

    name: str
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    batch: Callable[[int], Any]
    has_blocks: bool = True


def subjects(scale: int = 1) -> Iterator[Subject]:
    """All of them, so many times as wide, and their batches as long."""
    for name in TRANSFORMERS:
        yield Subject(
            name=name,
            build=partial(_from_config, name, scale),
            loss=_own_loss,
            batch=partial(_batch_of, name, scale),
            has_blocks=name not in _UNBLOCKED,
        )
    demo, mlp = partial(_demo, scale), partial(_mlp, scale)
    yield Subject(
        name="Lightning's Transformer", build=demo, loss=_demo_loss, batch=partial(_demo_batch, scale)
    )
    yield Subject(name="MLP", build=mlp, loss=_class_loss, batch=partial(_vectors, scale), has_blocks=False)
    yield Subject(name="CNN", build=_cnn, loss=_class_loss, batch=partial(_images, scale), has_blocks=False)
    yield Subject(name="residual CNN", build=_residual_cnn, loss=_class_loss, batch=partial(_images, scale))
    yield Subject(
        name="packed example",
        build=partial(_packed, scale),
        loss=_packed_loss,
        batch=partial(_packed_batch, scale),
    )


def config_of(name: str, scale: int) -> dict[str, Any]:
    """The configuration of a transformer, so many times as wide."""
    few = min(scale, _LARGEST_OF_IMAGES)
    config = dict(TRANSFORMERS[name])
    for key, value in config.items():
        if key in _WIDTHS:
            config[key] = scale * value
        elif key in _OF_IMAGES:
            config[key] = [few * one for one in value] if isinstance(value, list) else few * value
    return config


def _from_config(name: str, scale: int) -> nn.Module:
    import transformers

    cls: Any = getattr(transformers, name)
    config = cls.config_class(**config_of(name, scale))
    config.use_cache = False
    return cls(config)


def _own_loss(model: nn.Module, batch: Any) -> Tensor:
    return model(**batch).loss


def _batch_of(name: str, scale: int, samples: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    # Without its own kernels Mamba is a loop over tokens, which takes the host long.
    length = LENGTH if name.startswith("Mamba") else scale * LENGTH
    if name.endswith("ImageClassification"):
        images, labels = _images(scale, samples)
        return {"pixel_values": images, "labels": labels}
    ids = torch.randint(3, VOCABULARY, (samples, length), generator=generator)
    if name.startswith("Whisper"):
        return {"input_features": torch.randn(samples, 8, 2 * length, generator=generator), "labels": ids}
    batch = {"input_ids": ids, "labels": ids.clone()}
    return batch if name.startswith("Mamba") else {**batch, "attention_mask": torch.ones_like(ids)}


def _demo(scale: int) -> nn.Module:
    from lightning.pytorch.demos.transformer import Transformer

    return Transformer(
        vocab_size=scale * VOCABULARY, ninp=scale * WIDTH, nhead=4, nhid=2 * scale * WIDTH, nlayers=2
    )


def _demo_loss(model: nn.Module, batch: Any) -> Tensor:
    inputs, target = batch
    return F.nll_loss(model(inputs, target), target.view(-1))


def _demo_batch(scale: int, samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (samples, scale * LENGTH + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _mlp(scale: int) -> nn.Module:
    wide = 512 * scale
    return nn.Sequential(nn.Linear(256, wide), nn.GELU(), nn.Dropout(0.1), nn.Linear(wide, wide), nn.GELU(),
                         nn.Linear(wide, CLASSES))  # fmt: skip


def _class_loss(model: nn.Module, batch: Any) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def _vectors(scale: int, samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    samples *= 8 * scale
    return torch.randn(samples, 256, generator=generator), torch.arange(samples) % CLASSES


def _images(scale: int, samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    side = IMAGE * min(scale, _LARGEST_OF_IMAGES)
    return torch.randn(samples, 3, side, side, generator=generator), torch.arange(samples) % CLASSES


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES),
    )  # fmt: skip


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


def _residual_cnn() -> nn.Module:
    blocks = nn.ModuleList([_Residual(48) for _ in range(3)])
    return nn.Sequential(nn.Conv2d(3, 48, 3, padding=1, stride=2), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(48, CLASSES))  # fmt: skip


def _packed(scale: int) -> nn.Module:
    from examples.pretrain_causal_lm.model import CausalLM
    from lightning_memkit.attention import packed_attention

    return CausalLM(
        vocabulary_size=scale * VOCABULARY,
        width=scale * WIDTH,
        layers=2,
        heads=4,
        attention=packed_attention,
    )


def _packed_loss(model: Any, batch: Any) -> Tensor:
    logits = model(batch["input_ids"], batch["position_ids"], batch["cu_seqlens"])
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def _packed_batch(scale: int, samples: int) -> Any:
    from lightning_memkit.data.batching.collate import collate
    from lightning_memkit.data.packing.pack import pack
    from lightning_memkit.data.sources.token_records import token_store

    rng = np.random.default_rng(0)
    lengths = rng.integers(4, scale * LENGTH, 6 * samples)
    store = token_store([rng.integers(0, VOCABULARY, length) for length in lengths])
    return collate(store, pack(store.lengths, scale * LENGTH), range(samples))
