"""A causal language model whose MLPs are mixtures of experts: plain torch and Lightning."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.pretrain_causal_lm.model import Attention, Block, CausalLM, causal_attention


class Experts(nn.Module):
    """Gated MLPs of which each token uses a few; their weights lie in one tensor a matrix.

    Args:
        width: features of a token.
        hidden: features within an expert.
        num_experts: how many there are.
    """

    def __init__(self, width: int, hidden: int, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate_up = nn.Parameter(torch.randn(num_experts, width, 2 * hidden) * width**-0.5)
        self.down = nn.Parameter(torch.randn(num_experts, hidden, width) * hidden**-0.5)

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """Tokens [count, width], the experts of each and their shares [count, top_k], to tokens [count, width]."""
        order = chosen.flatten().argsort(stable=True)
        tokens = order // chosen.shape[1]
        ends = torch.bincount(chosen.flatten(), minlength=self.num_experts).cumsum(0)
        gate, up = self.product(x[tokens], self.gate_up, ends).chunk(2, dim=-1)
        out = self.product(F.silu(gate) * up, self.down, ends) * shares.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, tokens, out.to(x.dtype))

    def product(self, x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        """Rows that are sorted by expert, each times its expert's matrix."""
        if hasattr(F, "grouped_mm"):
            return F.grouped_mm(x, weights.to(x.dtype), offs=ends.int())
        begins = [0, *ends.tolist()]
        parts = [
            x[begin:end] @ w.to(x.dtype) for begin, end, w in zip(begins, begins[1:], weights, strict=False)
        ]
        return torch.cat(parts)


class ExpertBlock(Block):
    """A block whose MLP is a mixture: a router gives each token to `top_k` of `num_experts` experts."""

    def __init__(self, width: int, heads: int, attention: Attention, num_experts: int, top_k: int) -> None:
        super().__init__(width, heads, attention)
        del self.gate_up, self.down
        self.top_k = top_k
        self.router = nn.Linear(width, num_experts, bias=False)
        self.experts = Experts(width, 8 * (width // 6), num_experts)  # grouped products take multiples of 8

    def mlp(self, x: Tensor) -> Tensor:
        """Features [rows, length, width] of each token by itself."""
        flat = x.flatten(0, 1)
        shares, chosen = self.router(flat).float().softmax(-1).topk(self.top_k, dim=-1)
        shares = (shares / shares.sum(-1, keepdim=True)).to(x.dtype)
        return self.experts(flat, chosen, shares).view_as(x)


class MixtureLM(CausalLM):
    """Predicts the next token.

    Args:
        num_experts: experts a block.
        top_k: experts that a token uses.
        options: as of `CausalLM`.
    """

    def __init__(
        self,
        num_experts: int = 8,
        top_k: int = 2,
        width: int = 256,
        heads: int = 8,
        layers: int = 6,
        attention: Attention = causal_attention,
        **options: Any,
    ) -> None:
        super().__init__(width=width, heads=heads, layers=0, attention=attention, **options)
        self.blocks.extend(ExpertBlock(width, heads, attention, num_experts, top_k) for _ in range(layers))
