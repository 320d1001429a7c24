"""What `use_packed_attention` finds out about a model before it switches it, and what it looks at in each forward."""

import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memkit.attention.adapters import use_packed_attention
from lightning_memkit.attention.packed_mask import Forward, PackedMask
from lightning_memkit.attention.twin import twin_of
from lightning_memkit.initialization.building import build_empty, build_on
from tests.attention.test_transformers import (
    BOUNDS,
    GROUPED,
    ONE_TENSOR,
    PADDING,
    SMALL,
    logits_alone,
    model_of,
    packed,
)

transformers: Any = pytest.importorskip("transformers")

LLAMA_4 = {
    **GROUPED,
    "head_dim": 8,
    "num_local_experts": 2,
    "attention_chunk_size": 64,
    "no_rope_layers": [1, 0],
}


def differences(model: Any) -> float:
    batch = packed()
    expected = logits_alone(model, batch["input_ids"])
    use_packed_attention(model)
    with torch.no_grad():
        logits = model(**batch).logits.flatten(0, 1)
    return max(
        float((logits[begin:end] - alone).abs().max())
        for (begin, end), alone in zip(pairwise(BOUNDS), expected, strict=True)
        if begin not in PADDING
    )


def test_scales_by_the_place_in_the_row_are_refused_where_rows_reach_them():
    assert differences(model_of("Llama4ForCausalLM", **LLAMA_4, floor_scale=32)) <= 1e-5
    assert (
        differences(model_of("Llama4ForCausalLM", **LLAMA_4, floor_scale=4, attn_temperature_tuning=False))
        <= 1e-5
    )
    model = model_of("Llama4ForCausalLM", **LLAMA_4, floor_scale=24)
    use_packed_attention(model)
    tokens, bounds = torch.randint(3, 100, (1, 32)), torch.tensor([0, 20, 32], dtype=torch.int32)
    with pytest.raises(
        ValueError, match=r"place in the row from token 24 on .* rows have 32 tokens.*packing="
    ):
        model(tokens, cu_seqlens=bounds)
    with pytest.raises(ValueError, match="computes a packed document otherwise than alone|place in the row"):
        use_packed_attention(model_of("Llama4ForCausalLM", **LLAMA_4, floor_scale=4))


@pytest.mark.parametrize(
    ("name", "rope"),
    [
        (
            "Phi3ForCausalLM",
            {
                "rope_type": "longrope",
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "rope_theta": 10000.0,
            },
        ),
        ("LlamaForCausalLM", {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}),
    ],
)
def test_frequencies_by_the_longest_document_are_warned_of_once(name, rope):
    lengths = {"max_position_embeddings": 12}
    if rope["rope_type"] == "longrope":
        lengths = {"max_position_embeddings": 64, "original_max_position_embeddings": 12}
    model = model_of(name, **GROUPED, **lengths, rope_parameters=rope)
    use_packed_attention(model)
    tokens, long = torch.randint(3, 100, (1, 32)), torch.tensor([0, 20, 32], dtype=torch.int32)
    model(tokens, cu_seqlens=torch.tensor([0, 12, 24, 32], dtype=torch.int32), max_seqlen=12)
    with pytest.warns(UserWarning, match="by the longest document of the batch .* may exceed 12 tokens"):
        model(tokens, cu_seqlens=long, max_seqlen=20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(tokens, cu_seqlens=long, max_seqlen=20)


def test_a_head_with_one_result_a_row_is_refused():
    with pytest.raises(ValueError, match="no output for every token but one for a row"):
        use_packed_attention(model_of("LlamaForSequenceClassification", **GROUPED))
    use_packed_attention(model_of("LlamaForTokenClassification", **GROUPED))


class Blurred(nn.Module):
    """What a user's own module may do between two blocks."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x + 0.1 * x.cumsum(1))


def test_modules_that_a_user_has_put_in_are_tried_as_well():
    model = model_of("LlamaForCausalLM", **GROUPED)
    model.model.layers[0].mlp = Blurred(model.model.layers[0].mlp)
    with pytest.raises(ValueError, match="LlamaForCausalLM computes a packed document otherwise than alone"):
        use_packed_attention(model)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen3MoeForCausalLM", "RobertaForMaskedLM"])
def test_large_models_without_memory_are_tried_by_a_small_copy(name):
    cls = getattr(transformers, name)
    with torch.device("meta"):
        model = cls(cls.config_class())
    twin: Any = twin_of(model)
    assert sum(one.numel() for one in twin.parameters()) < 3e7
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use_packed_attention(model)
    with (
        torch.device("meta"),
        pytest.raises(ValueError, match="computes a packed document otherwise than alone"),
    ):
        use_packed_attention(transformers.FNetForMaskedLM(transformers.FNetConfig(num_hidden_layers=2)))


@pytest.mark.parametrize("build", [build_on, build_empty])
def test_random_numbers_dtypes_and_weights_are_left_as_they_were(build):
    def weights(switched: bool) -> tuple[Any, torch.Tensor]:
        torch.manual_seed(0)
        with build("cpu", torch.bfloat16):
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **GROUPED))
            if switched:
                use_packed_attention(model)
            after = torch.randn(3)
        assert {one.dtype for one in model.parameters()} == {torch.bfloat16}
        return model, after

    (plain, before), (switched, after) = weights(False), weights(True)
    assert torch.equal(before, after)
    assert torch.get_default_dtype() == torch.float32
    for one, other in zip(plain.parameters(), switched.parameters(), strict=True):
        assert one.is_meta == other.is_meta
        assert one.is_meta or torch.equal(one, other)


@pytest.mark.parametrize(
    "use",
    [
        lambda mask: mask[:, None],
        lambda mask: mask.shape,
        lambda mask: mask + torch.ones(2),
        lambda mask: torch.ones(2) * mask,
        lambda mask: torch.where(mask, 1.0, 0.0),
        lambda mask: ~mask,
        lambda mask: bool(mask),
    ],
)
def test_a_mask_that_is_used_as_a_tensor_says_what_to_do(use):
    mask = PackedMask(
        forward=Forward(cu_seqlens=ONE_TENSOR, max_seqlen=None, backend="loop"), causal=True, window=None
    )
    with pytest.raises(
        ValueError, match="uses its attention mask as a tensor .*: packing=.* Or let transformers mask"
    ):
        use(mask)
