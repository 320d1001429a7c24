"""Small models that train on several ranks, and what one process predicts of them."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from lightning_memkit import ActivationCheckpointing, FSDP2Strategy, PureBF16Precision
from lightning_memkit.plugins.planning.prediction import predict_memory

VOCABULARY, LENGTH, WIDTH, ROWS = 509, 32, 96, 4  # a prime: ranks' shares are uneven


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained, and how.

    Args:
        model: transformer or mlp.
        ranks: how many.
        strategy: ddp, ddp views, ddp unused, zero1, stage 2, stage 3 or in configure_model.
        precision: float32 or kahan.
        policy: of activation checkpointing.
        optimizer: foreach or loop.
        extra: mixed, clipped or accumulated (two batches a step), or nothing.
    """

    model: str = "transformer"
    ranks: int = 2
    strategy: str = "stage 3"
    precision: str = "float32"
    policy: str = "none"
    optimizer: str = "foreach"
    extra: str = ""

    def __str__(self) -> str:
        return ", ".join(str(value) for value in asdict(self).values() if value != "")


class Block(nn.Module):
    """Attention and a feed-forward layer, before each a norm."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, length, width) to the same."""
        parts = self.qkv(self.first(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Trained(LightningModule):
    """A small model whose strategy may want its optimizer sharded, or its blocks in `configure_model`."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        if case.model == "transformer":
            self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(4))
        else:
            wide = 3 * WIDTH
            layers = [
                nn.Sequential(nn.Linear(wide, 2 * wide), nn.ReLU(), nn.Linear(2 * wide, wide))
                for _ in range(5)
            ]
            ends = nn.Sequential(nn.Linear(WIDTH, wide)), nn.Sequential(nn.Linear(wide, WIDTH))
            self.blocks = nn.ModuleList([ends[0], *layers, ends[1]])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The mean loss of the labels."""
        x = self.embedding(batch["ids"])
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Optimizer:
        """AdamW as the case has it."""
        options: dict[str, Any] = {"lr": 1e-3, "foreach": self.case.optimizer == "foreach"}
        if self.case.strategy == "zero1":
            from torch.distributed.optim import ZeroRedundancyOptimizer

            return ZeroRedundancyOptimizer(self.parameters(), optimizer_class=AdamW, **options)
        return AdamW(self.parameters(), **options)


class Sharded(Trained):
    """The same, sharded by the user's own hand."""

    def configure_model(self) -> None:
        """Shard the blocks, the embedding and the head."""
        mesh: Any = self.device_mesh
        for module in (*self.blocks, self.embedding, self.head):
            if mesh is not None and not isinstance(next(module.parameters()), DTensor):
                fully_shard(module, mesh=mesh["data_parallel"])


class Batches:
    """So many batches, one after the other, as a loader would make them."""

    def __init__(self, number: int = 2) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for _ in range(self.number):
            yield batch()


def batch() -> dict[str, Tensor]:
    """Token ids and labels of one rank."""
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"ids": ids, "labels": ids.clone()}


def build(case: Case) -> Trained:
    """The module of a case; what a user shards has its dtype before."""
    if case.strategy != "in configure_model":
        return Trained(case)
    module = Sharded(case)
    return module if case.precision == "float32" else module.bfloat16()


def options(case: Case, *, real: bool) -> dict[str, Any]:
    """The Trainer's arguments; for a prediction those that a user would write."""
    kinds: dict[str, Any] = {
        "ddp views": lambda: DDPStrategy(gradient_as_bucket_view=True),
        "ddp unused": lambda: "ddp_find_unused_parameters_true",
        "stage 2": lambda: FSDP2Strategy(stage=2),
        "stage 3": lambda: "memkit_fsdp2",
        "in configure_model": lambda: ModelParallelStrategy(case.ranks, 1),
    }
    strategy = kinds.get(case.strategy, lambda: "ddp")()
    if real and case.strategy.startswith("stage"):
        strategy = FSDP2Strategy(stage=int(case.strategy[-1]))
    extras: dict[str, Any] = {
        "mixed": {"precision": "bf16-mixed"},
        "clipped": {"gradient_clip_val": 1.0},
        "accumulated": {"accumulate_grad_batches": 2},
    }
    found: dict[str, Any] = {"devices": case.ranks, "strategy": strategy, **extras.get(case.extra, {})}
    if case.precision != "float32":
        found["plugins"] = [PureBF16Precision()]
    if case.policy != "none":
        found["callbacks"] = [ActivationCheckpointing(case.policy)]
    return found


def predict(case: Case) -> int:
    """The predicted peak of the rank that holds the most."""
    torch.manual_seed(0)
    return predict_memory(build(case), batch(), trainer=options(case, real=False)).peak_bytes
