"""Every architecture of transformers that can be built small: packed as alone, or refused; nothing in between."""

import inspect
import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memkit.attention.adapters import use_packed_attention
from tests.attention.test_transformers import BOUNDS, PADDING, packed

transformers: Any = pytest.importorskip("transformers")

TOLERANCE = 1e-5  # float32, of the largest output
MOST_PARAMETERS = 20_000_000
WORDS = 100
# What configs of transformers call their sizes; each takes those that it knows.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "emb_dim"), 32),
    "word_embed_proj_dim": 32,
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "hidden_dim", "ffn_hidden_size"), 64),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "d_inner", "n_inner"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "index_head_dim", "head_dim", "d_kv"), 8),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "bos_token_id", "cls_token_id"), 1),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "index_n_heads"), 2),
    **dict.fromkeys(("eos_token_id", "sep_token_id"), 2),
    **dict.fromkeys(("max_position_embeddings", "index_topk"), 64),
    "vocab_size": 128, "pad_token_id": 0, "mask_token_id": 3, "local_attention": 4, "rotary_dim": 8,
}  # fmt: skip


def names() -> list[str]:
    """Causal and masked language models, and their bodies."""
    from transformers.models.auto import modeling_auto as auto

    found: set[str] = set()
    for kind in ("MODEL_FOR_CAUSAL_LM", "MODEL_FOR_MASKED_LM", "MODEL"):
        for name in getattr(auto, f"{kind}_MAPPING_NAMES").values():
            found.update([name] if isinstance(name, str) else name)
    with warnings.catch_warnings():  # some modules of earlier transformers use what torch deprecates
        warnings.simplefilter("ignore", DeprecationWarning)
        return sorted(name for name in found if hasattr(transformers, name))


def built(name: str) -> Any:
    """The model with small sizes and large random weights; None where it can't be built so."""
    cls = getattr(transformers, name)
    for left_out in ((), ("head_dim",), ("num_key_value_heads",), ("head_dim", "num_key_value_heads")):
        try:
            known = cls.config_class()
            sizes = {
                key: value for key, value in SIZES.items() if hasattr(known, key) and key not in left_out
            }
            config = cls.config_class(**sizes)
            with torch.device("meta"):
                if sum(one.numel() for one in cls(config).parameters()) > MOST_PARAMETERS:
                    return None
            torch.manual_seed(0)
            model = cls(config).eval()
            if "input_ids" not in inspect.signature(model.forward).parameters:
                return None
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() > 1:
                        nn.init.normal_(parameter, std=0.15)
                values(model(torch.randint(3, WORDS, (1, 6))))
            return model
        except Exception:
            continue
    return None


def values(output: Any) -> torch.Tensor:
    logits = getattr(output, "logits", None)
    return output.last_hidden_state if logits is None else logits


def difference(name: str) -> float | None | str:
    """How far packed documents are from documents alone, or the refusal; None where nothing is built."""
    model = built(name)
    if model is None:
        return None
    batch = packed(WORDS)
    del batch["labels"]
    with torch.no_grad():
        tokens = batch["input_ids"].flatten()[None]
        try:
            alone = [values(model(tokens[:, begin:end]))[0] for begin, end in pairwise(BOUNDS)]
        except (
            RuntimeError
        ):  # documents of one token are too short for it (Canine pools four): nothing to compare with
            return None
        try:
            use_packed_attention(model)
            together = values(model(**batch)).flatten(0, 1)
        except ValueError as refusal:
            return str(refusal)
    differences = [
        float((together[begin:end] - one).abs().max())
        for (begin, end), one in zip(pairwise(BOUNDS), alone, strict=True)
        if begin not in PADDING
    ]
    return max(differences) / max(1.0, max(float(one.abs().max()) for one in alone))


def is_a_refusal(message: str) -> bool:
    """Whether an error is ours, with what to do instead."""
    return "packing=" in message


EQUAL = ["EsmForMaskedLM", "XLMRobertaModel", "CamembertForMaskedLM", "Data2VecTextModel", "OlmoForCausalLM"]
REFUSED = [
    "FNetModel", "MobileBertModel", "ConvBertModel", "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM",
    "DogeForCausalLM",
]  # fmt: skip


@pytest.mark.parametrize("name", EQUAL)
def test_these_are_as_alone(name):
    found = difference(name)
    assert isinstance(found, float), found
    assert found <= TOLERANCE


@pytest.mark.parametrize("name", REFUSED)
def test_these_are_refused_with_a_remedy(name):
    found = difference(name)
    assert isinstance(found, str), found
    assert is_a_refusal(found), found


def test_a_model_of_images_and_text_is_refused_with_a_remedy():
    """PaliGemma, whose sizes are in configurations of its parts; its masks are neither causal nor of documents."""
    text = {"model_type": "gemma", "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    images = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
              "image_size": 28, "patch_size": 14, "projection_dim": 32, "vision_use_head": False}  # fmt: skip
    config = transformers.PaliGemmaConfig(
        text_config=text, vision_config=images, image_token_id=127, projection_dim=32
    )
    model = transformers.PaliGemmaForConditionalGeneration(config).eval()
    with pytest.raises(ValueError, match="packing="):
        use_packed_attention(model)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of a hundred models' own
@pytest.mark.parametrize("name", names())
def test_no_architecture_is_silently_off(name):
    found = difference(name)
    if found is None:
        pytest.skip("not built small")
    if isinstance(found, str):
        assert is_a_refusal(found), found
    else:
        assert found <= TOLERANCE
