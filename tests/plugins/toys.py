"""Small LightningModules with ordinary DataLoaders that several tests train."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader


class TokenTagger(LightningModule):
    """A mean over labels that are not -100, very unevenly many a sample; logs in every way there is."""

    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.embedding, self.mix = nn.Embedding(50, 16), nn.GRU(16, 32, batch_first=True)
        self.norm = nn.BatchNorm1d(32) if norm else nn.Identity()
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(32, 50)
        self.steps: list[int] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        hidden = self.mix(self.embedding(batch["x"]))[0]
        logits = self.head(self.dropout(self.norm(hidden.flatten(0, 1))))
        loss = F.cross_entropy(logits, batch["labels"].flatten())
        self.steps.append(len(batch["x"]))
        counted = (batch["labels"] != -100).sum()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("labels", counted.float(), reduce_fx="sum", on_step=True, on_epoch=False)
        self.log("longest", counted.float(), reduce_fx="max", on_step=False, on_epoch=True)
        self.log("mean_x", batch["x"].float().mean(), batch_size=len(batch["x"]))
        return {"loss": loss, "logits": logits.detach().view(len(batch["x"]), -1, 50)}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Mix(nn.Module):
    """In the place of a recurrent layer, which can't be sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 32)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.linear(x).tanh(),)


class ShardableTagger(TokenTagger):
    @staticmethod
    def rows(count: int) -> list[dict[str, Tensor]]:
        """What it trains on."""
        return tagged_rows(count)

    def __init__(self) -> None:
        super().__init__()
        self.mix = Mix()


class WeightedTagger(ShardableTagger):
    """A mean weighed by class, of which no number of the batch tells what it divides by."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # pyright: ignore
        logits = self.head(self.mix(self.embedding(batch["x"]))[0])
        classes = torch.linspace(0.1, 3, 50, dtype=logits.dtype)
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), weight=classes)


class MaskedTagger(ShardableTagger):
    """Two means, of which one is over tokens that a mask leaves; it leaves all of them in the first steps."""

    begins = 4

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # pyright: ignore
        hidden = self.mix(self.embedding(batch["x"]))[0]
        losses = F.cross_entropy(self.head(hidden).flatten(0, 1), batch["x"].flatten(), reduction="none")
        kept = (batch["x"].flatten() > 9) | (batch_idx < self.begins)
        return (losses * kept).sum() / kept.sum() + 0.1 * hidden.square().mean()


class GrowingTagger(ShardableTagger):
    """Its loss has one more term from a step on."""

    def has_term(self, batch: dict[str, Tensor], batch_idx: int) -> bool:
        return batch_idx > 3

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # pyright: ignore
        hidden = self.mix(self.embedding(batch["x"]))[0]
        loss = F.cross_entropy(self.head(hidden).flatten(0, 1), batch["labels"].flatten())
        return loss + hidden.square().mean() if self.has_term(batch, batch_idx) else loss


class RaggedTagger(GrowingTagger):
    """Whether its loss has one more term depends on the rows: some micro-batches have it, of either rank."""

    def has_term(self, batch: dict[str, Tensor], batch_idx: int) -> bool:
        return batch_idx > 3 and bool((batch["labels"] != -100).all())


class SparseTagger(ShardableTagger):
    """A mean over labels, of which about half of the rows have none."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # pyright: ignore
        logits = self.head(self.mix(self.embedding(batch["x"]))[0])
        labels = batch["labels"].masked_fill(batch["x"][:, :1] > 25, -100)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class PenalizedTagger(ShardableTagger):
    """A mean over rows that is kept from dividing by zero, and a penalty, which looks at no row."""

    @staticmethod
    def rows(count: int) -> list[dict[str, Tensor]]:
        """Half are not kept; in some steps none of a rank's, in two none of both."""
        return [
            {**row, "kept": (row["x"][0] <= 25).double() * (index // 8 not in (3, 6))}
            for index, row in enumerate(tagged_rows(count))
        ]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # pyright: ignore
        logits = self.head(self.mix(self.embedding(batch["x"]))[0])
        losses = F.cross_entropy(logits.movedim(-1, 1), batch["x"], reduction="none").mean(1)
        penalty = torch.stack([weight.square().sum() for weight in self.parameters()]).sum()
        return self.reduced(losses, batch["kept"]) + 0.01 * penalty

    def reduced(self, losses: Tensor, kept: Tensor) -> Tensor:
        return (losses * kept).sum() / kept.sum().clamp(min=1)


class EpsilonTagger(PenalizedTagger):
    """A number is added to its divisor: to that of both ranks once."""

    def reduced(self, losses: Tensor, kept: Tensor) -> Tensor:
        return (losses * kept).sum() / (kept.sum() + 1e-5)


class DetectorTagger(PenalizedTagger):
    """All rows add to what is divided by the number of those that are kept, as a detector's background does."""

    def reduced(self, losses: Tensor, kept: Tensor) -> Tensor:
        return 0.1 * losses.sum() / kept.sum().clamp(min=1)


class AveragedTagger(PenalizedTagger):
    """A mean over the mean of a mask, which is kept from less than a half; of rows with many labels."""

    @staticmethod
    def rows(count: int) -> list[dict[str, Tensor]]:
        labelled = [(row, int((row["labels"] != -100).sum())) for row in tagged_rows(count)]
        return [{**row, "kept": torch.tensor(float(n > 7 or n == 2)).double()} for row, n in labelled]

    def reduced(self, losses: Tensor, kept: Tensor) -> Tensor:
        return (losses * kept).mean() / kept.mean().clamp(min=0.5)


class TightTagger(ShardableTagger):
    """Runs out of memory on rank 1 with four rows at once."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        if len(batch["x"]) == 4 and self.trainer.global_rank == 1:
            raise torch.OutOfMemoryError("four rows are too many")
        return super().training_step(batch, batch_idx)


class AbsentTagger(ShardableTagger):
    """Passes over its first batch on rank 1, where it is whole."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        if len(batch["x"]) == 4 and batch_idx == 0 and self.trainer.global_rank == 1:
            return None
        return super().training_step(batch, batch_idx)


class _AsItIs(torch.autograd.Function):
    """Shows nothing of what stands before it."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class OpaqueTagger(ShardableTagger):
    """A mean over samples, though its batch has labels, behind a Function of its own."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # pyright: ignore
        hidden = self.mix(self.embedding(batch["x"]))[0]
        loss: Any = _AsItIs.apply(F.cross_entropy(self.head(hidden).flatten(0, 1), batch["x"].flatten()))
        return loss


class ContrastiveTagger(ShardableTagger):
    """Its rows act on each other."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # pyright: ignore
        hidden = self.head(self.mix(self.embedding(batch["x"]))[0]).mean(1)
        return F.cross_entropy(hidden @ hidden.T, torch.arange(len(hidden)))


class LossToy(LightningModule):
    """Trains `net` on a given loss, called with the module, `net`'s output and the labels; notes what it logs.

    Subclasses make `net` and `loss`.
    """

    net: nn.Module
    loss: Callable[[Any, Tensor, Tensor], Any]

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(self, self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def tagged_rows(count: int = 160, length: int = 12) -> list[dict[str, Tensor]]:
    """Rows of which 1 to 12 labels count."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for _ in range(count):
        x = torch.randint(0, 50, (length,), generator=generator)
        labels = x.roll(1).clone()
        labels[: int(torch.randint(0, length, (1,), generator=generator))] = -100
        rows.append({"x": x, "labels": labels})
    return rows


def loader(batch_size: int = 8, count: int = 160, **options: Any) -> DataLoader:
    return DataLoader(tagged_rows(count), batch_size=batch_size, **options)  # pyright: ignore[reportArgumentType]


def trainer(*callbacks: Any, max_steps: int = 20, **options: Any) -> Trainer:
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(max_steps=max_steps, callbacks=list(callbacks), **{**quiet, **options})


def weights(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def trained(
    *callbacks: Any,
    module: LightningModule | Callable[[], LightningModule] = TokenTagger,
    data: Any = None,
    dtype: torch.dtype = torch.float32,
    val_loaders: Any = None,
    **options: Any,
) -> tuple[LightningModule, Trainer]:
    """A module after training, from one seed; a function builds it under that seed."""
    torch.manual_seed(0)
    module = (module if isinstance(module, LightningModule) else module()).to(dtype)
    torch.manual_seed(1)
    fitted = trainer(*callbacks, **{"gradient_clip_val": 0.5, **options})
    fitted.fit(module, loader() if data is None else data, val_loaders)
    return module, fitted
