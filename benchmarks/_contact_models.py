"""What the mistakes and projects of `first_contact` train."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_memkit import PackedBatch, packed_attention

STEPPED = "stepped"
WIDTH, HEADS = 16, 2


class Steps(Callback):
    """Leaves a file once a step has ended."""

    def on_train_batch_end(self, *_: Any) -> None:
        """Note the step."""
        Path(STEPPED).touch()


class Table(nn.Module):
    """An embedding that is no `nn.Embedding`."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(vocabulary, WIDTH))

    def forward(self, input_ids: Tensor) -> Tensor:
        """A row an id."""
        return F.embedding(input_ids, self.rows)


class Block(nn.Module):
    """Attention alone."""

    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.packed = packed

    def forward(self, x: Tensor, batch: PackedBatch) -> Tensor:
        """Over the documents of the batch, or over whole rows."""
        heads = self.inner(x).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        if self.packed:
            seen = packed_attention(heads[0], heads[1], heads[2], batch["cu_seqlens"])
        else:
            seen = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        return x + self.outer(seen.transpose(1, 2).flatten(2))


class Words(LightningModule):
    """A language model of one block."""

    def __init__(self, vocabulary: int = 259, optimizer: str = "AdamW", attention: str = "packed") -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(vocabulary, WIDTH), nn.Linear(WIDTH, vocabulary)
        self.block, self.optimizer_name = Block(attention == "packed"), optimizer

    def forward(self, input_ids: Tensor, batch: PackedBatch) -> Tensor:
        """Logits a token."""
        return self.output(self.block(self.embedding(input_ids), batch))

    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        """Cross-entropy a label."""
        return F.cross_entropy(self(batch["input_ids"], batch).flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One of torch's, by name."""
        return getattr(torch.optim, self.optimizer_name)(self.parameters(), lr=1e-3)


class Wrapped(LightningModule):
    """An own class around a model of transformers."""

    def __init__(self, vocabulary: int = 259) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes: dict[str, Any] = {
            "hidden_size": WIDTH,
            "intermediate_size": WIDTH,
            "num_attention_heads": HEADS,
        }
        config = LlamaConfig(vocab_size=vocabulary, num_hidden_layers=1, **sizes)
        self.inner = LlamaForCausalLM(config)

    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        """The model's own loss."""
        return self.inner(input_ids=batch["input_ids"], labels=batch["labels"]).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Tabled(Words):
    """The same with a table of its own."""

    def __init__(self, vocabulary: int = 259) -> None:
        super().__init__()
        self.embedding = Table(vocabulary)
