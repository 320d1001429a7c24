"""Two encoders that put what belongs together close to each other, in an ordinary LightningModule."""

from collections.abc import Mapping

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F


class Encoder(nn.Module):
    """A small transformer over bytes; its output is the mean over a text's bytes, of length 1.

    Args:
        width: features of a byte; a multiple of 32, which a head has.
        layers: blocks.
        longest: bytes of a text at the most.
        vocabulary: how many ids there are; the last one pads.
    """

    def __init__(self, width: int, layers: int, longest: int, vocabulary: int = 257) -> None:
        super().__init__()
        self.pad = vocabulary - 1
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width,
                width // 32,
                4 * width,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        """From ids [rows, bytes] to [rows, width]."""
        is_pad = ids == self.pad
        x = self.embedding(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, src_key_padding_mask=is_pad)
        x = self.norm(x).masked_fill(is_pad[..., None], 0)
        return F.normalize(x.sum(1) / (~is_pad).sum(1, keepdim=True).clamp_min(1), dim=1)


class TwoTowers(LightningModule):
    """Learns to find the answer to a query among all answers of the batch.

    Args:
        width: features of both encoders.
        layers: blocks of each.
        longest: bytes of a query and of an answer.
        learning_rate: AdamW's.
    """

    def __init__(
        self,
        width: int = 64,
        layers: int = 4,
        longest: tuple[int, int] = (64, 128),
        learning_rate: float = 2e-3,
    ) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.query, self.answer = (Encoder(width, layers, most) for most in longest)
        self.temperature = nn.Parameter(torch.tensor(10.0).log())

    def scores(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Of every query [rows] with every answer [columns]."""
        return (self.temperature.exp() * self.query(batch["query"])) @ self.answer(batch["answer"]).T

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy of each query over all answers of the batch (InfoNCE)."""
        scores = self.scores(batch)
        loss = F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> None:
        """How often the right answer is the first."""
        scores = self.scores(batch)
        own = torch.arange(len(scores), device=scores.device)
        self.log("val_first", (scores.argmax(1) == own).float().mean(), prog_bar=True, batch_size=len(scores))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
