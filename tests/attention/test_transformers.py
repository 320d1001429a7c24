"""Packed attention in models of transformers: they give the logits of documents alone, and are left as they were."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memkit.attention import hugging_face
from lightning_memkit.attention.adapters import use_packed_attention
from lightning_memkit.attention.positions import cache_given
from lightning_memkit.data.batching.batch import PackedBatch
from lightning_memkit.utilities.errors import NoEffectWarning

transformers: Any = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 128,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {"num_key_value_heads": 2}
SEVEN = {
    "LlamaForCausalLM": GROUPED,
    "Qwen3ForCausalLM": {**GROUPED, "head_dim": 8},
    "MistralForCausalLM": {**GROUPED, "sliding_window": 4},
    "Gemma3ForCausalLM": {
        **GROUPED,
        "head_dim": 8,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "GPT2LMHeadModel": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "GPTNeoXForCausalLM": {},
    "OPTForCausalLM": {"ffn_dim": 64, "word_embed_proj_dim": 32},
}
OTHERS = {
    "Gemma2ForCausalLM": {**GROUPED, "head_dim": 8, "sliding_window": 4, "attn_logit_softcapping": 2.0},
    "Phi3ForCausalLM": {},
    "MixtralForCausalLM": {**GROUPED, "num_local_experts": 4},
    "BertForMaskedLM": {},
    "RobertaForMaskedLM": {"max_position_embeddings": 24},
    "ModernBertForMaskedLM": {"local_attention": 4, "cls_token_id": 1, "sep_token_id": 2},
}
# Two rows of 16, with a document of one token; each row ends in padding.
BOUNDS = [0, 5, 6, 12, 16, 19, 29, 32]
PADDING = (12, 29)
ONE_TENSOR = torch.tensor(BOUNDS, dtype=torch.int32)


def model_of(name: str, **options: Any) -> Any:
    """A small model with weights so large that a leak is no rounding."""
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    model = cls(
        cls.config_class(**{**SMALL, **SEVEN.get(name, {}), **OTHERS.get(name, {}), **options})
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.15)
    return model


def packed(vocabulary: int = 128) -> PackedBatch:
    tokens = torch.randint(3, vocabulary, (2, 16), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(end - begin) for begin, end in pairwise(BOUNDS)])
    labels = tokens.flatten().clone()
    for begin, end in pairwise(BOUNDS):
        positions[begin:end] += begin in PADDING
        labels[begin : end if begin in PADDING else begin + 1] = -100
    return PackedBatch(
        input_ids=tokens,
        labels=labels.view(2, 16),
        position_ids=positions.view(2, 16),
        cu_seqlens=ONE_TENSOR.clone(),
        max_seqlen=10,
    )


def logits_alone(model: nn.Module, tokens: Tensor) -> list[Tensor]:
    """The logits of each document by itself, as the model gives them without us."""
    with torch.no_grad():
        return [model(tokens.flatten()[None, begin:end]).logits[0] for begin, end in pairwise(BOUNDS)]


@pytest.mark.parametrize("name", [*SEVEN, *OTHERS])
def test_logits_are_those_of_documents_alone(name):
    model, batch = model_of(name), packed()
    expected = logits_alone(model, batch["input_ids"])
    use_packed_attention(model)
    with torch.no_grad():
        logits = model(**batch).logits.flatten(0, 1)
    for (begin, end), alone in zip(pairwise(BOUNDS), expected, strict=True):
        if begin not in PADDING:
            assert (logits[begin:end] - alone).abs().max() <= 1e-5


@pytest.mark.parametrize("told", ["cu_seqlens", "cu_seq_lens_q", "position_ids"])
def test_documents_are_told_in_three_ways(told):
    model, batch = model_of("LlamaForCausalLM"), packed()
    use_packed_attention(model)
    given = {told: batch["cu_seqlens" if told == "cu_seq_lens_q" else told]}
    with torch.no_grad():
        expected = model(**batch).logits
        logits = model(batch["input_ids"], **given).logits
    real = batch["position_ids"].flatten() >= 0
    for begin in PADDING:
        real[begin : BOUNDS[BOUNDS.index(begin) + 1]] = False
    assert torch.equal(logits.flatten(0, 1)[real], expected.flatten(0, 1)[real])


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "MistralForCausalLM"])
def test_gradients_are_those_of_documents_alone_through_activation_checkpointing(name):
    """Two forwards before the first backward: each recomputation needs the documents of its own."""
    model, batch = model_of(name).train(), packed()
    whole_rows = {"cu_seqlens": torch.tensor([0, 16, 32]), "position_ids": torch.arange(16).expand(2, -1)}
    other = PackedBatch({**batch, **whole_rows})
    other["labels"] = batch["input_ids"]
    total = torch.zeros(())
    for begin, end in pairwise(BOUNDS):
        if begin in PADDING or end - begin < 2:
            continue
        tokens = batch["input_ids"].flatten()[None, begin:end]
        total = total + model(tokens, labels=tokens).loss * (end - begin - 1)
    total = (
        total / int((batch["labels"] != -100).sum()) + model(other["input_ids"], labels=other["labels"]).loss
    )
    total.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    use_packed_attention(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    (model(**batch).loss + model(**other).loss).backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_without_documents_the_model_attends_as_before(implementation):
    model, tokens = model_of("Gemma3ForCausalLM", attn_implementation=implementation), packed()["input_ids"]
    mask = torch.ones_like(tokens)
    mask[1, :5] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)

    def forwards() -> list[Tensor]:
        with torch.no_grad():
            padded = model(tokens, attention_mask=mask, position_ids=positions).logits
            return [padded, model(tokens).logits, model.generate(tokens, max_new_tokens=3, do_sample=False)]

    before = forwards()
    use_packed_attention(model)
    assert all(torch.equal(now, then) for now, then in zip(forwards(), before, strict=True))


def test_the_undo_is_exact():
    model, batch = model_of("LlamaForCausalLM"), packed()

    def state() -> Any:
        hooks = [
            (
                len(module._forward_pre_hooks),
                len(module._forward_hooks),
                len(module._forward_hooks_always_called),
            )
            for module in model.modules()
        ]
        return model.config._attn_implementation, model.model.config._attn_implementation, hooks

    options = {"position_ids": batch["position_ids"], "use_cache": False}
    before, expected = state(), model(batch["input_ids"], **options).logits
    undo = use_packed_attention(model)
    assert state() != before
    undo()
    assert state() == before
    assert torch.equal(model(batch["input_ids"], **options).logits, expected)


def test_a_failed_forward_leaves_nothing_behind():
    model, batch = model_of("LlamaForCausalLM"), packed()
    use_packed_attention(model)
    with pytest.raises(IndexError):
        model(**{**batch, "input_ids": batch["input_ids"] + 1000})
    assert hugging_face._running.get() is None
    with torch.no_grad():
        model(batch["input_ids"])


def test_models_inside_a_module_are_found_and_dropout_is_theirs():
    outer = nn.Module()
    outer.model = model_of("LlamaForCausalLM", attention_dropout=0.5).train()
    batch = packed()
    use_packed_attention(outer)
    assert not torch.equal(outer.model(**batch).logits, outer.model(**batch).logits)
    outer.eval()
    assert torch.equal(outer.model(**batch).logits, outer.model(**batch).logits)


def test_a_named_backend_is_used():
    model = model_of("LlamaForCausalLM")
    use_packed_attention(model, "flash_attn")
    with pytest.raises(ValueError, match="backend='flash_attn' can't run"):
        model(**packed())
    with pytest.raises(ValueError, match="backend='flesh' is unknown"):
        use_packed_attention(nn.Linear(1, 1), "flesh")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"attention_mask": torch.ones(2, 16)},
            "attention_mask was passed beside packed documents; leave it out",
        ),
        ({"use_cache": True}, "use_cache=True .* was passed beside packed documents"),
    ],
)
def test_what_contradicts_packing_is_refused(given, message):
    model = model_of("LlamaForCausalLM")
    use_packed_attention(model)
    with pytest.raises(ValueError, match=message):
        model(**packed(), **given)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("T5ForConditionalGeneration", {}, "is an encoder with a decoder"),
        ("BloomForCausalLM", {"n_head": 4}, "without transformers' interface"),
        ("MambaForCausalLM", {}, "takes no position_ids"),
        ("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"]}, r"layers\.0\.conv\.conv \(Conv1d\)"),
        (
            "MiniMaxForCausalLM",
            {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 2},
            "layers of the type linear_attention",
        ),
    ],
)
def test_models_that_can_not_be_switched_are_refused_at_once(name, options, message):
    model = model_of(name, **options)
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=f"{name}.*{message}"):
        use_packed_attention(model)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "GptOssForCausalLM",
            {"num_local_experts": 4, "head_dim": 8},
            r"GptOssAttention adds s_aux to its scores.*: packing=\"none\"\.$",
        ),
        (
            "Llama4ForCausalLM",
            {"attention_chunk_size": 4, "head_dim": 8},
            'neither causal nor in both directions.*: packing="none"\\. Or let transformers mask its documents',
        ),
    ],
)
def test_attention_of_another_kind_is_refused_and_not_guessed(name, options, message):
    model = model_of(name, **GROUPED, **options)
    with pytest.raises(ValueError, match=message):
        use_packed_attention(model)


def test_twice_is_refused_and_nothing_to_switch_is_reported():
    model = model_of("LlamaForCausalLM")
    use_packed_attention(model)
    with pytest.raises(ValueError, match="uses packed attention already"):
        use_packed_attention(model)
    with pytest.warns(NoEffectWarning, match="No model of transformers is in Linear"):
        use_packed_attention(nn.Linear(1, 1))()


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_a_cache_is_known_by_both_of_its_names(name):
    assert cache_given({name: object(), "input_ids": None})
    assert not cache_given({name: None})
