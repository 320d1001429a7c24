"""The modules that can run in chunks are found by what they do."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_memkit import checkpoint_chunks
from lightning_memkit.activations.chunks.finding import find_chunkable
from tests.activations.chunks.test_libraries import ROWS, VOCABULARY, causal_model, clip_model, pairs


def test_the_towers_of_clip() -> None:
    net = clip_model()
    found = find_chunkable(net, lambda: net(**pairs(), return_loss=True).loss, "rows")
    assert [one.name for one in found] == ["text_model", "vision_model"]
    assert all(one.freed_bytes > ROWS * 2 * 16 * 32 for one in found)


def test_what_takes_tokens_one_by_one_in_a_llama() -> None:
    net = causal_model()
    ids = torch.randint(3, VOCABULARY, (2, 30), generator=torch.Generator().manual_seed(1))
    found = {one.name for one in find_chunkable(net, lambda: net(ids, labels=ids).loss, "tokens")}
    parts = ("mlp", "input_layernorm", "post_attention_layernorm")
    expected = {f"model.layers.{layer}.{part}" for layer in (0, 1) for part in parts}
    assert expected <= found
    projections = {f"model.layers.{layer}.self_attn.{part}_proj" for layer in (0, 1) for part in "qkv"}
    assert {
        name for name in found if "self_attn" in name
    } == projections  # they read what norms in chunks give
    rows = [one.name for one in find_chunkable(net, lambda: net(ids, labels=ids).loss, "rows")]
    assert rows == ["model"]


@pytest.mark.parametrize("kind", ["gpt2", "bert", "t5", "mamba"])
def test_models_that_view_their_arguments_have_chunks_of_tokens(kind: str) -> None:
    """MLPs of Conv1D, encoders, relative positions, a scan: found, with the unchunked gradients."""
    import transformers as hf

    small: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    t5: dict[str, Any] = {
        "d_model": 16,
        "d_ff": 48,
        "d_kv": 8,
        "num_layers": 2,
        "num_heads": 2,
        "decoder_start_token_id": 0,
    }
    dropout: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    configs: dict[str, Any] = {
        "gpt2": lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(
                vocab_size=50, n_embd=16, n_layer=2, n_head=2, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0
            )
        ),
        "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(vocab_size=50, **small, **dropout)),
        "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=50, dropout_rate=0, **t5)),
        "mamba": lambda: hf.MambaForCausalLM(
            hf.MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2)
        ),
    }
    parts = {
        "gpt2": "h.1.mlp",
        "bert": "layer.1.intermediate",
        "t5": "encoder.block.1.layer.1",
        "mamba": "in_proj",
    }
    ids = torch.randint(3, 50, (2, 30), generator=torch.Generator().manual_seed(1))
    gradients: list[list[Any]] = []
    for tokens in (None, 7):
        torch.manual_seed(0)
        net = configs[kind]().double().train()
        net.config.use_cache = False
        if tokens is not None:
            found = find_chunkable(net, lambda net=net: net(input_ids=ids, labels=ids).loss, "tokens")
            assert any(one.name.endswith(parts[kind]) for one in found), [one.name for one in found]
            for one in found:
                checkpoint_chunks(one.module, tokens=tokens)
        net(input_ids=ids, labels=ids).loss.backward()
        gradients.append([weight.grad for weight in net.parameters()])
    for plain, chunked in zip(*gradients, strict=True):
        assert (plain is None) == (chunked is None)
        if plain is not None and chunked is not None:
            assert torch.allclose(plain, chunked, rtol=1e-9, atol=1e-13)


class Mixed(nn.Module):
    """Batch norm amid modules that treat rows alone, one of which runs twice, and one never."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 6))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Dropout(0.1), nn.Linear(24, 6)), norm)
            for norm in (nn.BatchNorm1d(6), nn.LayerNorm(6))
        )
        self.unused = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 6))
        self.head = nn.Linear(6, 3)

    def training_step(self, x: Tensor) -> Any:
        x = self.stem(x) + self.stem(x + 1)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), torch.arange(len(x)) % 3)


def test_modules_around_batch_norm() -> None:
    net = Mixed()
    x = torch.randn(20, 6, generator=torch.Generator().manual_seed(1))
    state = {name: value.clone() for name, value in net.state_dict().items()}
    with torch.random.fork_rng():
        found = find_chunkable(net, lambda: net.training_step(x), "rows")
    assert [one.name for one in found] == ["stem", "blocks.0.0", "blocks.1"]
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in net.modules())
    changed = [name for name, value in net.state_dict().items() if not torch.equal(value, state[name])]
    assert {name.rpartition(".")[0] for name in changed} == {"blocks.0.1"}  # the step's own doing, once
    assert int(net.get_buffer("blocks.0.1.num_batches_tracked")) == 1


def test_rows_that_are_all_alike_show_nothing() -> None:
    net = Mixed()
    for part in net.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0  # behind it rows would differ
    assert find_chunkable(net, lambda: net.training_step(torch.ones(20, 6)), "rows") == []


def test_a_module_that_communicates_is_not_asked() -> None:
    """Nor what holds it: `blocks.1`, which is found otherwise; what is beside it is (a dropout, and what reads it)."""
    net, issued = Mixed(), [0]

    def communicate(*_: Any) -> None:
        issued[0] += 1

    net.blocks.get_submodule("1.0.1").register_forward_hook(communicate)
    x = torch.randn(20, 6, generator=torch.Generator().manual_seed(1))
    found = find_chunkable(net, lambda: net.training_step(x), "rows", lambda: issued[0])
    assert [one.name for one in found] == ["stem", "blocks.0.0", "blocks.1.0.2", "blocks.1.0.3"]
    assert issued == [1]
    assert find_chunkable(net, lambda: net.training_step(x), "rows", lambda: None) == []
