"""Models of transformers, adapters of PEFT and packed rows, in chunks: their own results."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_memkit import checkpoint_chunks, linear_cross_entropy

ROWS, LENGTH, VOCABULARY = 9, 12, 50


def clip_model() -> Any:
    from transformers import CLIPConfig, CLIPModel

    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config={**small, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "eos_token_id": 2},
        vision_config={**small, "image_size": 8, "patch_size": 4},
        projection_dim=8,
    )
    torch.manual_seed(0)
    return CLIPModel(config).double().train()


def pairs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, LENGTH + 1, (ROWS, 1), generator=generator)
    return {
        "input_ids": torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator),
        "attention_mask": (torch.arange(LENGTH) < lengths).long(),
        "pixel_values": torch.randn(ROWS, 3, 8, 8, generator=generator, dtype=torch.float64),
    }


def trained(net: nn.Module, loss: Callable[[], Tensor], steps: int = 4) -> dict[str, Tensor]:
    optimizer = torch.optim.AdamW([one for one in net.parameters() if one.requires_grad], lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    return {name: one.detach() for name, one in net.named_parameters()}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        # Softmax doesn't see the keys' bias, so that its gradient is rounding, of which AdamW makes much.
        allowed = 1e-10 if name.endswith("k_proj.bias") else 1e-12
        assert float((found[name] - value).abs().max()) <= allowed, name


@pytest.mark.parametrize("rows", [1, 4])
def test_both_towers_of_clip(rows: int) -> None:
    batch = pairs()

    def run(chunked: bool) -> dict[str, Tensor]:
        net = clip_model()
        if chunked:
            checkpoint_chunks(net.text_model, rows=rows)
            checkpoint_chunks(net.vision_model, rows=rows)
        return trained(net, lambda: net(**batch, return_loss=True).loss)

    assert_close(run(True), run(False))


def causal_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).double().train()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # PEFT asks transformers
@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "LoRA"])
def test_what_takes_tokens_one_by_one_in_a_llama(adapted: bool) -> None:
    """Norms and MLPs in chunks of tokens, the loss without logits, whole blocks in chunks of rows."""
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))

    def run(chunked: str) -> dict[str, Tensor]:
        net = model = causal_model()
        if adapted:
            from peft import LoraConfig, get_peft_model

            targets = ["q_proj", "down_proj"]
            net = get_peft_model(
                model, LoraConfig(target_modules=targets, init_lora_weights=False, r=2)
            ).double()
        for layer in model.model.layers:
            if chunked == "tokens":
                for part in (layer.mlp, layer.input_layernorm, layer.post_attention_layernorm):
                    checkpoint_chunks(part, tokens=5)
            elif chunked == "rows":
                checkpoint_chunks(layer, rows=2)

        def loss() -> Tensor:
            hidden = model.model(ids).last_hidden_state
            return linear_cross_entropy(
                hidden[:, :-1].flatten(0, 1), model.lm_head.weight, ids[:, 1:].flatten()
            )

        return trained(net, loss)

    plain = run("")
    assert_close(run("tokens"), plain)
    assert_close(run("rows"), plain)


def test_a_token_classifier_of_transformers_refuses_chunks_of_tokens() -> None:
    net = causal_model()
    checkpoint_chunks(net.model.layers[0].self_attn, tokens=5)
    with pytest.raises(ValueError, match="LlamaAttention"):
        net(torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1)))


def test_experts_in_chunks_of_tokens_choose_as_they_do_on_the_whole() -> None:
    class Experts(nn.Module):
        """Some experts get no token of some chunks."""

        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(8, 6)
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            flat = x.flatten(0, 1)
            weight, best = self.router(flat).softmax(1).max(1)
            out = torch.zeros_like(flat)
            for number, expert in enumerate(self.experts):
                mine = (best == number).nonzero()[:, 0]
                out = out.index_add(0, mine, expert(flat[mine]) * weight[mine, None])
            return out.view_as(x)

    def run(chunked: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), Experts()).double()
        if chunked:
            checkpoint_chunks(net[1], tokens=3)
        x = torch.randn(2, 20, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        return trained(net, lambda: F.mse_loss(net(x), x))

    assert_close(run(True), run(False))
