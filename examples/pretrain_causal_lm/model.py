"""A small Llama-style causal language model in an ordinary LightningModule: plain torch, Lightning, torchmetrics."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.text import Perplexity

Attention = Callable[..., Tensor]


def causal_attention(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Causal attention over whole rows; for packed rows name an attention that reads `cu_seqlens`."""
    if cu_seqlens is not None:
        raise ValueError("causal_attention can't keep packed documents apart; pass attention= one that can.")
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Block(nn.Module):
    """Attention with rotary positions, then a gated MLP; RMSNorm before each."""

    def __init__(self, width: int, heads: int, attention: Attention) -> None:
        super().__init__()
        self.heads, self.attention = heads, attention
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        hidden = 8 * width // 3
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], cu_seqlens: Tensor | None) -> Tensor:
        """Features [rows, length, width] to the next block's."""
        rows, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = self.attention(rotate(query, rotation), rotate(key, rotation), value, cu_seqlens=cu_seqlens)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.mlp_norm(x))

    def mlp(self, x: Tensor) -> Tensor:
        """Features [rows, length, width] of each token by itself."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding; the angles stay float32, the result has x's dtype."""
    cos, sin = rotation
    left, right = x.chunk(2, dim=-1)
    turned = torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)
    return turned.to(x.dtype)


class CausalLM(LightningModule):
    """Predicts the next token.

    Args:
        vocabulary_size: distinct tokens.
        width: features of a token; a multiple of `heads`.
        layers: blocks.
        heads: attention heads.
        attention: from (query, key, value, cu_seqlens=) to values; must keep documents apart if rows are packed.
        learning_rate: AdamW's, after a linear warm-up over `warmup_steps`, then on a cosine to a tenth.
        warmup_steps: steps of the warm-up.
        weight_decay: AdamW's, on matrices only.
    """

    inv_freq: Tensor

    def __init__(
        self,
        vocabulary_size: int = 512,
        width: int = 256,
        layers: int = 6,
        heads: int = 8,
        attention: Attention = causal_attention,
        learning_rate: float = 1e-3,
        warmup_steps: int = 50,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        self.learning_rate, self.warmup_steps, self.weight_decay = learning_rate, warmup_steps, weight_decay
        self.embedding = nn.Embedding(vocabulary_size, width)
        self.blocks = nn.ModuleList(Block(width, heads, attention) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary_size, bias=False)
        self.head.weight = self.embedding.weight
        half = width // heads // 2
        self.register_buffer("inv_freq", 10_000 ** -(torch.arange(half) / half), persistent=False)
        self.perplexity = Perplexity(ignore_index=-100)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """Logits [rows, length, vocabulary_size]."""
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        angles = (position_ids[:, None, :, None] * self.inv_freq).float()
        rotation = (angles.cos(), angles.sin())
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x, rotation, cu_seqlens)
        return self.head(self.norm(x))

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Tensor:
        """Cross-entropy a token; labels of -100 (padding, first tokens of documents) don't count."""
        logits, labels = self._logits_and_labels(batch)
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        """Loss and perplexity of held-out documents."""
        logits, labels = self._logits_and_labels(batch)
        self.perplexity(logits.float(), labels)
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        count = int((labels != -100).sum())
        self.log("val_loss", loss, prog_bar=True, batch_size=count)
        self.log("val_perplexity", self.perplexity, on_epoch=True, batch_size=count)

    def configure_optimizers(self) -> Any:
        """AdamW, decay on matrices only; warm-up, then a cosine to a tenth."""
        matrices = [p for p in self.parameters() if p.ndim >= 2]
        vectors = [p for p in self.parameters() if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": self.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.learning_rate, betas=(0.9, 0.95))
        steps = max(self.warmup_steps + 1, int(self.trainer.estimated_stepping_batches))
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, 1.0, self.warmup_steps)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, steps - self.warmup_steps, 0.1 * self.learning_rate
        )
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [self.warmup_steps])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _logits_and_labels(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        logits = self(batch["input_ids"], batch.get("position_ids"), batch.get("cu_seqlens"))
        return logits[:, :-1], batch["labels"][:, 1:]
