"""Experts of several builds: what is resident, and what a token finds active."""

from typing import Any

import pytest
import torch
from torch import nn

from examples.mixture_of_experts.model import MixtureLM
from lightning_memkit.memory.experts import expert_bytes


def test_a_dense_model_has_none():
    assert expert_bytes(nn.Sequential(nn.Linear(4, 4))) is None


def test_bytes_by_hand():
    module = MixtureLM(vocabulary_size=32, width=24, heads=2, layers=3, num_experts=6, top_k=2)
    found = expert_bytes(module)
    assert found is not None
    of_one = 3 * 24 * 32 * 4  # gate, up and down, hidden 32, float32
    assert (found.layers, found.experts, found.chosen) == (3, 6, 2)
    assert found.resident == 3 * 6 * of_one == found.held
    assert found.active == 3 * 2 * of_one
    assert found.weights == sum(p.numel() * 4 for p in module.parameters())
    assert "3 layers of 6, 2 for a token" in str(found)


def test_a_list_of_experts_with_a_router_beside_it():
    class Router(nn.Linear):
        top_k = 1

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.experts = Router(4, 5), nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

    found = expert_bytes(nn.Sequential(Mixture(), Mixture()))
    assert found is not None
    assert (found.layers, found.experts, found.chosen) == (2, 5, 1)
    assert found.active * 5 == found.resident


@pytest.mark.parametrize("name", ["MixtralForCausalLM", "Qwen3MoeForCausalLM"])
def test_those_of_transformers(name):
    import transformers

    from benchmarks._prediction_models import TRANSFORMERS

    kind = getattr(transformers, name)
    model = kind(kind.config_class(**TRANSFORMERS[name]))
    found = expert_bytes(model)
    assert found is not None
    assert (found.experts, found.chosen) == (4, 2)
    assert found.active * 2 == found.resident
    experts = [p for n, p in model.named_parameters() if ".experts." in n]
    assert found.resident == sum(p.numel() * p.element_size() for p in experts)


def test_grouped_products_are_those_of_each_token_by_itself(monkeypatch):
    torch.manual_seed(0)
    module = MixtureLM(vocabulary_size=32, width=16, heads=2, layers=1, num_experts=4, top_k=2).double()
    block: Any = module.blocks[0]
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    shares, chosen = block.router(x.flatten(0, 1)).float().softmax(-1).topk(2, dim=-1)
    shares = (shares / shares.sum(-1, keepdim=True)).double()
    expected = torch.stack([
        torch.stack([share * _expert(block.experts, token, int(i)) for share, i in zip(s, c, strict=True)]).sum(0)
        for token, s, c in zip(x.flatten(0, 1), shares, chosen, strict=True)
    ])  # fmt: skip
    monkeypatch.delattr("torch.nn.functional.grouped_mm", raising=False)  # it knows no float64
    torch.testing.assert_close(block.mlp(x).flatten(0, 1), expected)


def _expert(experts: Any, token: torch.Tensor, index: int) -> torch.Tensor:
    gate, up = (token @ experts.gate_up[index]).chunk(2)
    return (nn.functional.silu(gate) * up) @ experts.down[index]
