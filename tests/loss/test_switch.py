"""transformers' causal models with ChunkedLoss's switch against the same models without it."""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false
import copy
import inspect
import warnings

import pytest
import torch

from lightning_memkit.loss.lazy_logits import LazyLogits
from lightning_memkit.loss.switch import use_chunked_loss
from lightning_memkit.memory.meter import ByteMeter
from lightning_memkit.utilities.errors import NoEffectWarning

transformers = pytest.importorskip("transformers")

VOCABULARY = 97
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
OWN_NAMES = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0}
MODELS = {
    "Llama": GROUPED,
    "Qwen2": GROUPED,
    "Qwen3": GROUPED,
    "Mistral": GROUPED,
    "Gemma2": {**GROUPED, "final_logit_softcapping": 3.0},
    "Gemma3": {**GROUPED, "class": "Gemma3ForCausalLM", "config": "Gemma3TextConfig"},
    "Mixtral": {**GROUPED, "num_local_experts": 4, "output_router_logits": True},
    "Cohere": {**GROUPED, "logit_scale": 0.3, "bos_token_id": 1, "eos_token_id": 2},
    "Granite": {**GROUPED, "logits_scaling": 2.0},
    "Phi": {**SIZES, **NO_DROPOUT},
    "GPTNeoX": {**SIZES, "attention_dropout": 0.0, "hidden_dropout": 0.0},
    "GPT2": {
        **OWN_NAMES,
        "class": "GPT2LMHeadModel",
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "OPT": {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "Mamba": {**SIZES, "state_size": 4},
    "T5": {
        "class": "T5ForConditionalGeneration",
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "d_ff": 48,
        "d_kv": 8,
        "num_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
    },
    "Bert": {
        **SIZES,
        "class": "BertForMaskedLM",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
}


def build(name, **changes):
    options = {**MODELS[name], **changes}
    model = getattr(transformers, options.pop("class", f"{name}ForCausalLM"))
    config = getattr(transformers, options.pop("config", f"{name}Config"))
    torch.manual_seed(0)
    return model(config(**options)).train()


@pytest.fixture(autouse=True)
def quiet():
    """What the libraries say about toy configurations says nothing about memkit."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=NoEffectWarning)
        yield
    transformers.logging.set_verbosity(level)


def batch():
    ids = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels}


def step(model, **given):
    model.zero_grad()
    out = model(**given)
    out.loss.backward()
    return out, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_the_models_own(name):
    model, given = build(name), batch()
    plain, plain_gradients = step(model, **given)
    undo = use_chunked_loss(model)
    ours, gradients = step(model, **given)
    assert type(ours.logits) is LazyLogits
    torch.testing.assert_close(ours.loss, plain.loss)
    torch.testing.assert_close(gradients, plain_gradients, rtol=1e-4, atol=1e-6)
    undo()
    again, _ = step(model, **given)
    assert type(again.logits) is torch.Tensor
    assert torch.equal(again.loss, plain.loss)


@pytest.mark.parametrize(
    "extra",
    [
        {"num_items_in_batch": 7},
        {"num_items_in_batch": torch.tensor(7)},
        {"logits_to_keep": 0},
        {"shift_labels": torch.randint(VOCABULARY, (2, 12))},
        {"use_cache": False, "position_ids": torch.arange(12).repeat(2, 1)},
        {"return_dict": False},
    ],
    ids=lambda extra: next(iter(extra)),
)
def test_keywords_do_what_they_do(extra):
    model, given = build("Llama"), batch() | extra
    plain = model(**given)
    undo = use_chunked_loss(model)
    ours = model(**given)
    torch.testing.assert_close(ours[0], plain[0])
    undo()


def test_logits_to_keep_goes_with_as_many_labels():
    model, given = build("Llama"), batch()
    given["labels"] = given["labels"][:, -5:]
    plain, plain_gradients = step(model, **given, logits_to_keep=5)
    use_chunked_loss(model)
    ours, gradients = step(model, **given, logits_to_keep=5)
    assert ours.logits.shape == plain.logits.shape
    torch.testing.assert_close(ours.loss, plain.loss)
    torch.testing.assert_close(gradients, plain_gradients)


def test_the_auxiliary_loss_stays():
    model, given = build("Mixtral"), batch()
    use_chunked_loss(model)
    ours = model(**given)
    without = model(**given, output_router_logits=False)
    assert ours.aux_loss > 0
    torch.testing.assert_close(ours.loss, without.loss + model.router_aux_loss_coef * ours.aux_loss)


def test_logits_can_be_read_and_labels_may_come_by_position():
    model, given = build("Llama"), batch()
    plain = model(**given).logits
    use_chunked_loss(model)
    names = list(inspect.signature(model.forward).parameters)
    by_position = [given.get(name) for name in names[: names.index("labels") + 1]]
    with torch.no_grad():
        out = model(*by_position)
        assert type(out.logits) is LazyLogits
        torch.testing.assert_close(out.logits[:, -1] + 0, plain[:, -1].detach())


def test_without_labels_and_in_generation_nothing_changes():
    model, ids = build("Llama").eval(), batch()["input_ids"]
    plain, generated = model(ids).logits, model.generate(ids, max_new_tokens=4, do_sample=False)
    use_chunked_loss(model)
    logits = model(ids).logits
    assert type(logits) is torch.Tensor
    assert torch.equal(logits, plain)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), generated)


def test_an_error_in_the_forward_leaves_no_trace():
    model, given = build("Llama"), batch()
    use_chunked_loss(model)
    with pytest.raises(IndexError):
        model(**{**given, "labels": given["labels"] + VOCABULARY})
    assert type(model(given["input_ids"]).logits) is torch.Tensor


def test_tied_weights_and_copies():
    model, given = build("Llama", tie_word_embeddings=True), batch()
    _, plain = step(model, **given)
    undo = use_chunked_loss(model)
    _, ours = step(copy.deepcopy(model), **given)
    torch.testing.assert_close(ours, plain)
    undo()
    assert "forward" not in vars(model)
    assert "forward" not in vars(model.lm_head)


def test_bfloat16_is_as_close_to_float64_as_without():
    model, given = build("Llama", vocab_size=500).bfloat16(), batch()
    plain, plain_gradients = step(model, **given)
    truth, true_gradients = step(copy.deepcopy(model).double(), **given)
    use_chunked_loss(model)
    ours, gradients = step(model, **given)
    assert ours.loss.dtype is plain.loss.dtype is torch.float32
    assert abs(ours.loss - truth.loss) <= 1.01 * abs(plain.loss - truth.loss) + 1e-6
    for name, true in true_gradients.items():
        error, usual = (
            (given[name].double() - true).norm() / true.norm() for given in (gradients, plain_gradients)
        )
        assert error < 1.05 * usual, name


def test_memory_of_a_step_loses_the_logits():
    peaks = []
    for chunked in (False, True):
        model = build("Llama", vocab_size=20_000)
        if chunked:
            use_chunked_loss(model)
        ids = torch.randint(20_000, (2, 512))
        with ByteMeter() as meter:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        peaks.append(meter.peak_bytes)
    logits = 2 * 512 * 20_000 * 4
    assert peaks[0] > 3 * logits
    assert peaks[1] < peaks[0] - 2 * logits


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft asks by the old name
def test_adapters_with_a_trained_head():
    peft = pytest.importorskip("peft")
    given = batch()
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], lora_dropout=0.0)
    model = peft.get_peft_model(build("Llama"), config)
    plain, plain_gradients = step(model, **given)
    undo = use_chunked_loss(model)
    ours, gradients = step(model, **given)
    assert type(ours.logits) is LazyLogits
    torch.testing.assert_close(ours.loss, plain.loss)
    torch.testing.assert_close(gradients, plain_gradients)
    undo()
    adapted = peft.get_peft_model(build("Llama"), peft.LoraConfig(target_modules=["lm_head"]))
    with pytest.raises(
        ValueError, match=r"lm_head is a Linear, no plain nn.Linear: call linear_cross_entropy"
    ):
        use_chunked_loss(adapted)


def test_a_frozen_head_gets_no_gradient():
    model, given = build("Llama"), batch()
    model.lm_head.weight.requires_grad_(False)
    _, plain = step(model, **given)
    use_chunked_loss(model)
    _, ours = step(model, **given)
    assert model.lm_head.weight.grad is None
    torch.testing.assert_close(ours, plain)
