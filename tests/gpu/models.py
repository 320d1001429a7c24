"""A decoder in plain torch at any size, a LightningModule of it, and rows of tokens."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.gpu.card import accelerator, sized


class Block(nn.Module):
    """Causal attention, then a gated MLP; a norm before each."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, hidden = heads, 11 * width // 4
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate_up, self.down = (
            nn.Linear(width, 2 * hidden, bias=False),
            nn.Linear(hidden, width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(*qkv, is_causal=True).transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    """Token ids to logits."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, ids: Tensor) -> Tensor:
        """Of the next token."""
        return F.cross_entropy(self(ids)[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def small() -> Decoder:
    """About 30 million parameters; 60,000 on the CPU."""
    torch.manual_seed(0)
    return Decoder(sized(8192, 64), sized(512, 32), 6, sized(8, 2))


def billion() -> Decoder:
    """A billion parameters, made on the card, where that takes no time; 150,000 on the CPU."""
    torch.manual_seed(0)
    with torch.device(accelerator()):
        return Decoder(sized(32_000, 64), sized(2048, 48), sized(18, 6), sized(16, 2))


class Language(LightningModule):
    """Trains a decoder with AdamW."""

    def __init__(self, build: Any = small) -> None:
        super().__init__()
        self.network = build()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.network.loss(batch["ids"])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def tokens(rows: int, length: int, vocabulary: int = 64, seed: int = 0) -> Tensor:
    """Ids on the host."""
    return torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))


def batches(count: int, rows: int = 8, length: int = 64) -> DataLoader:
    """So many batches of rows of tokens, in order."""
    data: Any = [{"ids": row} for row in tokens(count * rows, length)]
    return DataLoader(data, batch_size=rows)
