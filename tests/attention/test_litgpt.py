"""Packed attention in litgpt's models: a stand-in with its signatures, and the package's own where installed."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_memkit.attention.adapters import use_packed_attention
from lightning_memkit.attention.contamination import ContaminationError, probe_contamination
from tests.attention.test_transformers import BOUNDS, PADDING, packed

WINDOW = 4


class CausalSelfAttention(nn.Module):
    """litgpt's signatures: `forward(x, cos, sin, mask, input_pos, input_pos_maxp1)`, and SDPA in a method."""

    def __init__(self, config: Any, block_idx: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)
        self.apply_sliding_window_attention = bool(config.sliding_window_indices[block_idx])
        self.config, self.mscale = config, 1.0

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Any = None,
        input_pos: Any = None,
        input_pos_maxp1: Any = None,
    ) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        if self.apply_sliding_window_attention and x.size(1) > WINDOW:
            mask = torch.full((x.size(1),) * 2, -torch.inf)
            mask = (mask.triu(1) + mask.tril(-WINDOW))[None, None]
        return self.proj(self.scaled_dot_product_attention(query, key, value, mask).flatten(2))

    def scaled_dot_product_attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        scale = self.config.attention_scores_scalar**-0.5
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale).transpose(
            1, 2
        )


class Block(nn.Module):
    def __init__(self, config: Any, block_idx: int) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(32), CausalSelfAttention(config, block_idx)

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        return x + self.attn(self.norm(x), *others)


class GPT(nn.Module):
    """The stand-in."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.reentrant = config, None
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(128, 32),
            "h": nn.ModuleList(Block(config, index) for index in range(2)),
        })  # fmt: skip
        self.lm_head = nn.Linear(32, 128)

    def forward(self, idx: Tensor, input_pos: Any = None, input_pos_maxp1: Any = None) -> Tensor:
        x, cos = self.transformer["wte"](idx), torch.zeros(1)
        for block in self.transformer["h"]:  # pyright: ignore[reportGeneralTypeIssues]
            if self.reentrant is None:
                x = block(x, cos, cos, None, input_pos, input_pos_maxp1)
            else:
                x = checkpoint(
                    block, x, cos, cos, None, input_pos, input_pos_maxp1, use_reentrant=self.reentrant
                )
        return self.lm_head(x)


def stand_in(**options: Any) -> Any:
    torch.manual_seed(0)
    defaults = {"attention_scores_scalar": 4, "sliding_window_size": WINDOW, "sliding_window_indices": [1, 0]}
    return GPT(SimpleNamespace(**{**defaults, **options}))


def theirs() -> Any:
    own = pytest.importorskip("litgpt.model")
    torch.manual_seed(0)
    sizes = {
        "n_layer": 2,
        "n_embd": 32,
        "n_head": 4,
        "n_query_groups": 2,
        "padded_vocab_size": 128,
        "block_size": 32,
    }
    window = {"sliding_window_size": WINDOW, "sliding_window_indices": [1, 0], "attention_scores_scalar": 4}
    return own.GPT(own.Config(**sizes, **window, attention_logit_softcapping=3.0))


@pytest.fixture(params=[stand_in, theirs])
def model(request):
    return request.param()


def test_logits_are_those_of_documents_alone(model):
    batch = packed()
    tokens = batch["input_ids"].flatten()
    with torch.no_grad():
        expected = [model(tokens[None, begin:end])[0] for begin, end in pairwise(BOUNDS)]
        use_packed_attention(model)
        logits = model(batch["input_ids"], cu_seqlens=batch["cu_seqlens"], max_seqlen=10).flatten(0, 1)
    for (begin, end), alone in zip(pairwise(BOUNDS), expected, strict=True):
        if begin not in PADDING:
            assert (logits[begin:end] - alone).abs().max() <= 1e-5


def test_the_probe_catches_it_before_and_passes_it_after(model):
    batch = packed()

    def run(part: Any) -> Tensor:
        return model(part["input_ids"])

    with pytest.raises(ContaminationError, match=r"transformer.h.0.attn \(CausalSelfAttention\)"):
        probe_contamination(model, batch, run)
    use_packed_attention(model)
    with pytest.raises(ContaminationError):
        probe_contamination(model, batch, run)
    assert probe_contamination(
        model, batch, lambda part: model(part["input_ids"], cu_seqlens=part["cu_seqlens"])
    )


def test_without_documents_and_after_the_undo_it_attends_as_before(model):
    tokens = packed()["input_ids"]
    before = model(tokens)
    state = {name: set(vars(module)) for name, module in model.named_modules()}
    undo = use_packed_attention(model)
    model(tokens, cu_seqlens=torch.tensor(BOUNDS))
    assert torch.equal(model(tokens), before)
    undo()
    assert torch.equal(model(tokens), before)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == state
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_block_by_itself_has_no_documents():
    model = stand_in()
    block, x = model.transformer["h"][1], torch.randn(2, 16, 32)
    before = block(x, None, None)
    use_packed_attention(model)
    model(packed()["input_ids"], cu_seqlens=torch.tensor(BOUNDS))
    assert torch.equal(block(x, None, None), before)


def gradients(model: Any) -> list[Tensor]:
    """Of two forwards with different documents, the backward after both."""
    tokens = packed()["input_ids"]
    model.zero_grad()
    bounds = torch.tensor(BOUNDS), torch.tensor([0, 9, 16, 32])
    sum(model(tokens, cu_seqlens=each).square().mean() for each in bounds).backward()  # pyright: ignore
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_activation_checkpointing_finds_the_documents_again():
    model = stand_in()
    use_packed_attention(model)
    expected = gradients(model)
    model.reentrant = False
    assert all(torch.equal(now, then) for now, then in zip(gradients(model), expected, strict=True))


def test_a_recomputation_that_lost_its_documents_is_stopped():
    model = stand_in()
    use_packed_attention(model)
    model.reentrant = True
    with pytest.raises(ValueError, match="computed again without its documents.*use_reentrant=False"):
        gradients(model)


def test_what_can_not_be_packed_is_refused():
    model = stand_in()
    use_packed_attention(model)
    with pytest.raises(ValueError, match="uses packed attention already"):
        use_packed_attention(model)
    with pytest.raises(ValueError, match="input_pos was passed beside cu_seqlens"):
        model(packed()["input_ids"], cu_seqlens=torch.tensor(BOUNDS), input_pos=torch.arange(16))
    with pytest.raises(ValueError, match="GPT has latent attention"):
        use_packed_attention(stand_in(latent_attention={"q_lora_rank": 8}))
