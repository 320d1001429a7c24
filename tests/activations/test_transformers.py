# pyright: reportAttributeAccessIssue=false
"""The transformers classes that support checkpointing, and the two that don't, under every eager policy."""

import copy

import pytest
import torch

from lightning_memkit import checkpoint_modules
from tests.activations.models import CAUSAL, SMALL, transformers_model

POLICIES = ["full", "every:2", "selective", "budget:0.5"]
IMAGES = {
    "ViTForImageClassification": {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32,
        "patch_size": 8, "hidden_dropout_prob": 0.1,
    },
    "ResNetForImageClassification": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2]},
    "ConvNextForImageClassification": {
        "hidden_sizes": [8, 16], "depths": [2, 2], "num_stages": 2, "drop_path_rate": 0.1,
    },
}  # fmt: skip
PAIRS = {
    "T5ForConditionalGeneration": {
        "vocab_size": 128, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
        "decoder_start_token_id": 0, "pad_token_id": 0,
    },
    "WhisperForConditionalGeneration": {
        "vocab_size": 128, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_mel_bins": 8,
        "max_source_positions": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None,
    },
}  # fmt: skip
NAMES = [*CAUSAL, *IMAGES, *PAIRS]


def build(name):
    if name in CAUSAL:
        return transformers_model(name)
    import transformers

    cls = getattr(transformers, name)
    options = IMAGES.get(name) or PAIRS[name]
    config = cls.config_class(**options)
    config.use_cache = False
    return cls(config)


def inputs(name):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, SMALL["vocab_size"], (2, 16), generator=generator)
    if name in IMAGES:
        return {
            "pixel_values": torch.randn(2, 3, 32, 32, generator=generator),
            "labels": torch.tensor([0, 1]),
        }
    if name == "WhisperForConditionalGeneration":
        return {"input_features": torch.randn(2, 8, 32, generator=generator), "labels": ids}
    return {"input_ids": ids, "labels": ids}


def step(model, batch):
    model.zero_grad()
    torch.manual_seed(3)
    loss = model(**batch).loss
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    found |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    return {"loss": loss.detach(), **found}


UNSUPPORTED = {
    "ResNetForImageClassification": "ResNetConvLayer",
    "ConvNextForImageClassification": "ConvNextLayer",
}


@pytest.mark.parametrize(
    "policy", [pytest.param(p, marks=[] if p == "budget:0.5" else pytest.mark.slow) for p in POLICIES]
)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore:The budget of .* can't be met")
def test_gradients_are_bitwise_those_of_the_plain_model(name, policy):
    model = build(name).train()
    ours = copy.deepcopy(model)
    checkpoint_modules(ours, policy, blocks=[UNSUPPORTED[name]] if name in UNSUPPORTED else None)
    batch = inputs(name)
    for _ in range(2):
        mine, plain = step(ours, batch), step(model, batch)
        assert mine.keys() == plain.keys()
        for key, value in plain.items():
            assert torch.equal(mine[key], value), key


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_models_that_do_not_support_it_say_so(name):
    with pytest.raises(ValueError, match=rf"{name} says that it does not support .* name its blocks"):
        checkpoint_modules(build(name))
