"""Five small models whose throughput depends on the size of the parts in different ways."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

IGNORED = -100


class Model(LightningModule):
    """Cross-entropy over the labels that are not ignored, AdamW."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The mean loss of the batch's labels."""
        logits = self.net(batch["x"])
        return F.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten(), ignore_index=IGNORED)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW in one kernel."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


class Attention(nn.Module):
    """Attention that keeps all scores, a residual, and a linear layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Features [rows, length, width] to the next block's."""
        rows, length, width = x.shape
        qkv = self.qkv(x).view(rows, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        scores = (qkv[0] @ qkv[1].transpose(-1, -2)) / math.sqrt(width // self.heads)
        mixed = scores.softmax(-1) @ qkv[2]
        return x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))


class Recurrent(nn.Module):
    """An embedding, a GRU and a head."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding, self.gru = nn.Embedding(vocabulary, width), nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of every token."""
        return self.head(self.gru(self.embedding(tokens))[0])


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its data, and how much of a batch the budget has room for.

    Args:
        name: what the table calls it.
        module: builds the model under a seed that is set.
        rows: samples of the effective batch.
        fits: the samples in a part that the budget is made for.
        sample: a sample from its index.
        collate: samples to a batch.
    """

    name: str
    module: Callable[[], Model]
    rows: int
    fits: int
    sample: Callable[[int], dict[str, Tensor]]
    collate: Callable[[list[dict[str, Tensor]]], dict[str, Tensor]]

    def loader(self, batches: int, *, batch_size: int | None = None, first: int = 0) -> DataLoader:
        """A loader over so many batches of samples, in order."""
        samples: Any = [self.sample(first + index) for index in range(batches * self.rows)]
        return DataLoader(samples, batch_size=batch_size or self.rows, collate_fn=self.collate)


def cases() -> tuple[Case, ...]:
    """A convolutional net, a large vocabulary, a deep and narrow net, attention over long rows, and a GRU."""
    return (
        Case(
            name="convolutions", module=lambda: Model(_convolutions()), rows=32, fits=32,
            sample=lambda i: _image(i, 48), collate=_stacked,
        ),
        Case(
            name="large vocabulary, uneven lengths", module=lambda: Model(_embedding(2048, 64)), rows=24, fits=12,
            sample=lambda i: _text(i, 2048, _length(i)), collate=_padded,
        ),
        Case(
            name="deep and narrow", module=lambda: Model(_narrow(60, 32)), rows=64, fits=40,
            sample=lambda i: _vector(i, 32), collate=_stacked,
        ),
        Case(
            name="attention over long rows", module=lambda: Model(_attention(64, 4, 2)), rows=12, fits=12,
            sample=lambda i: _text(i, 257, 320), collate=_stacked,
        ),
        Case(
            name="GRU", module=lambda: Model(Recurrent(64, 96)), rows=32, fits=24,
            sample=lambda i: _text(i, 64, 64), collate=_stacked,
        ),
    )  # fmt: skip


def _convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 32), (32, 32)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def _narrow(depth: int, width: int) -> nn.Module:
    layers = [
        layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.LayerNorm(width), nn.GELU())
    ]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def _attention(width: int, heads: int, layers: int) -> nn.Module:
    blocks = [Attention(width, heads) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(257, width), *blocks, nn.Linear(width, 257))


def _embedding(vocabulary: int, width: int) -> nn.Module:
    return nn.Sequential(
        nn.Embedding(vocabulary, width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width),
        nn.Linear(width, vocabulary),
    )  # fmt: skip


def _generator(index: int) -> torch.Generator:
    return torch.Generator().manual_seed(index)


def _image(index: int, side: int) -> dict[str, Tensor]:
    return {"x": torch.randn(3, side, side, generator=_generator(index)), "labels": torch.tensor(index % 10)}


def _vector(index: int, width: int) -> dict[str, Tensor]:
    return {"x": torch.randn(width, generator=_generator(index)), "labels": torch.tensor(index % 10)}


def _length(index: int) -> int:
    """A heavy tail: half of the rows are shorter than 23, one of 256 is as long as rows may be."""
    uniform = float(torch.rand((), generator=_generator(index)))
    return min(256, int(16 / max(uniform, 1e-3) ** 0.5))


def _text(index: int, vocabulary: int, length: int) -> dict[str, Tensor]:
    tokens = torch.randint(0, vocabulary, (length,), generator=_generator(index))
    return {"x": tokens, "labels": tokens.roll(-1)}


def _stacked(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def _padded(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    padding = {"x": 0, "labels": IGNORED}
    return {
        name: nn.utils.rnn.pad_sequence(
            [s[name] for s in samples], batch_first=True, padding_value=padding[name]
        )
        for name in samples[0]
    }
