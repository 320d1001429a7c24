"""What the sweep of exactness trains: tiny models, columns of random data, and what a case is."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

FEATURES, HIDDEN, CLASSES, ROWS, LENGTH, VOCABULARY, OUTPUTS = 6, 8, 4, 8, 6, 12, 3
BATCHES, EPOCHS = (8, 8, 8, 8, 8, 5), 2
DTYPES = ("float64", "float32", "bf16-mixed", "pure-bf16", "lora")

PARTS = "parts"  # the loss is a weighted combination of its micro-batches' losses
TERMS = "terms"  # each of its terms is, with other weights
ROWS_ACT = "rows"  # rows act on each other: no weights exist
STATE = "state"  # the step changes something that several micro-batches would change otherwise

LATE = 4  # the first batch, and step, of what changes late: after those whose loss is compared in any case

# The rows of each call of training_step, and of those of them whose loss was differentiated outside of trials: kept
# here, since a module's own list would be its state.
seen: list[int] = []
with_backward: list[int] = []


def at_least_float32(value: Tensor) -> Tensor:
    """What transformers does with logits before a loss."""
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value


class Trained(LightningModule):
    """Logs its loss; AdamW with an epsilon that keeps rounding of small gradients from becoming steps.

    With epsilon at 1e-8 a gradient that is zero but for rounding moves its weight as far as a large one does: the
    weights would tell rounding, and a true difference of a thousandth not. 1e-4 is below every gradient that counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net: Any = self.build()

    def build(self) -> nn.Module:
        """The layers."""
        return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))

    def logits(self, batch: Any) -> Tensor:
        """The net's outputs for the batch's `x`, in float32 at least."""
        return at_least_float32(self.net(batch["x"]))

    def loss(self, batch: Any) -> Tensor:
        """What is minimized."""
        raise TypeError(f"{type(self).__name__} has no loss.")

    def step(self, batch: Any, batch_idx: int) -> Any:
        """The loss, logged by step and epoch."""
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """One micro-batch."""
        seen.append(rows_of(batch))
        return self.step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        """AdamW."""
        return torch.optim.AdamW(self.trainable(), lr=1e-2, eps=1e-4)

    def trainable(self) -> list[nn.Parameter]:
        """What the optimizer steps."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]


class Tokens(Trained):
    """Logits for each token."""

    def build(self) -> nn.Module:
        """Each token for itself."""
        return nn.Sequential(
            nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES)
        )


def rows_of(batch: Any) -> int:
    """The rows of a batch's first tensor."""
    if isinstance(batch, Tensor):
        return len(batch)
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return next((rows for rows in map(rows_of, batch) if rows), 0)
    return 0


class Pair(NamedTuple):
    """A batch with fields."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training step, what it trains on, and whether its loss decomposes in truth.

    Args:
        name: unique; `--only` takes it.
        truth: PARTS, TERMS, ROWS_ACT or STATE.
        module: builds the model from the global seed.
        columns: names in the batch to names of COLUMNS.
        container: from the batch's dictionary to what the loader gives.
        batches: the rows of an epoch's batches.
        trainer: options of the Trainer.
        callbacks: builds what is passed beside MemoryBudget.
        dtypes: those that the step runs in.
        warned: what memkit's warning of a documented inexactness says (a pattern); such cells count as warned.
        named: what a refusal has to name (a pattern).
        float32_loss: the loss is taken in float32 whatever the model's dtype.
    """

    name: str
    truth: str
    module: Callable[[], LightningModule]
    columns: Mapping[str, str]
    container: Callable[[dict[str, Any]], Any] = dict
    batches: tuple[int, ...] = BATCHES
    trainer: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[Any]] = list
    dtypes: tuple[str, ...] = DTYPES
    warned: str = ""
    named: str = ""
    float32_loss: bool = False

    @property
    def decomposable(self) -> bool:
        """Whether a refusal is wrong."""
        return self.truth == PARTS


def _floats(*shape: int) -> Callable[[int, torch.Generator], Tensor]:
    # Rounded to bfloat16: all dtypes train on the same numbers.
    return lambda rows, g: torch.randn(rows, *shape, generator=g).bfloat16().float()


def _integers(high: int, *shape: int) -> Callable[[int, torch.Generator], Tensor]:
    return lambda rows, g: torch.randint(0, high, (rows, *shape), generator=g)


def _ignored(value: int, high: int, share: float, *shape: int) -> Callable[[int, torch.Generator], Tensor]:
    """Classes of which a share is ignored, never all of a batch."""

    def column(rows: int, g: torch.Generator) -> Tensor:
        classes = torch.randint(0, high, (rows, *shape), generator=g)
        ignored = torch.rand(classes.shape, generator=g) < share
        ignored.view(-1)[int(torch.randint(0, ignored.numel(), (1,), generator=g))] = False
        return classes.masked_fill(ignored, value)

    return column


def _ragged(value: int, high: int) -> Callable[[int, torch.Generator], Tensor]:
    """Token classes of which a prefix of 0 to LENGTH - 1 is ignored."""

    def column(rows: int, g: torch.Generator) -> Tensor:
        classes = torch.randint(0, high, (rows, LENGTH), generator=g)
        starts = torch.randint(0, LENGTH, (rows, 1), generator=g)
        return classes.masked_fill(torch.arange(LENGTH) < starts, value)

    return column


def _mask(share: float, *shape: int) -> Callable[[int, torch.Generator], Tensor]:
    """Ones with that probability, at least one in a batch."""

    def column(rows: int, g: torch.Generator) -> Tensor:
        mask = (torch.rand(rows, *shape, generator=g) < share).float()
        mask.view(-1)[int(torch.randint(0, mask.numel(), (1,), generator=g))] = 1.0
        return mask

    return column


def _seldom(rows: int, g: torch.Generator) -> Tensor:
    """Classes, of which two batches in five have none."""
    classes = torch.randint(0, CLASSES, (rows,), generator=g)
    return classes if torch.rand((), generator=g) < 0.6 else torch.full_like(classes, -100)


def _seldom_kept(*shape: int) -> Callable[[int, torch.Generator], Tensor]:
    """Half ones; two batches in five have none."""

    def column(rows: int, g: torch.Generator) -> Tensor:
        mask = (torch.rand(rows, *shape, generator=g) < 0.5).float()
        return mask if torch.rand((), generator=g) < 0.6 else torch.zeros_like(mask)

    return column


def _shares(rows: int, g: torch.Generator) -> Tensor:
    return torch.randn(rows, CLASSES, generator=g).softmax(1)


def _attention(rows: int, g: torch.Generator) -> Tensor:
    return (torch.arange(LENGTH) < torch.randint(1, LENGTH + 1, (rows, 1), generator=g)).long()


def _distinct(rows: int, g: torch.Generator) -> Tensor:
    return torch.randperm(VOCABULARY, generator=g)[:rows]


def _with_holes(rows: int, g: torch.Generator) -> Tensor:
    """Numbers of which a third is missing."""
    values = torch.randn(rows, OUTPUTS, generator=g).bfloat16().float()
    return values.masked_fill(torch.rand(values.shape, generator=g) < 0.3, torch.nan)


COLUMNS: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "features": _floats(FEATURES),
    "other features": _floats(FEATURES),
    "classes": _integers(CLASSES),
    "rare classes": lambda rows, g: (torch.rand(rows, generator=g) < 0.08).long(),
    "ignored classes": _ignored(-100, CLASSES, 0.3),
    "mostly ignored classes": _ignored(-1, CLASSES, 0.8),
    "floats": _floats(OUTPUTS),
    "binary": lambda rows, g: (torch.rand(rows, OUTPUTS, generator=g) < 0.2).float(),
    "seldom labelled": _seldom,
    "shares": _shares,
    "weights": lambda rows, g: torch.rand(rows, generator=g).bfloat16().float() + 0.25,
    "row mask": _mask(0.3),
    "rare row mask": _mask(0.1),
    "other row mask": _mask(0.5),
    "token mask": _mask(0.4, LENGTH),
    "seldom row mask": _seldom_kept(),
    "seldom token mask": _seldom_kept(LENGTH),
    "tokens": _integers(VOCABULARY, LENGTH),
    "token classes": _integers(CLASSES, LENGTH),
    "ragged classes": _ragged(-100, CLASSES),
    "ragged tokens": _ragged(-100, VOCABULARY),
    "attention": _attention,
    "neighbours": _integers(VOCABULARY, LENGTH),
    "images": _floats(2, 5, 5),
    "segments": _ignored(255, CLASSES, 0.5, 5, 5),
    "ids": _distinct,
    "repeated ids": _integers(3),
    "no class": lambda rows, g: torch.zeros(rows, dtype=torch.int64),
    "two classes": _integers(2),
    "with holes": _with_holes,
    "all rows": lambda rows, g: torch.ones(rows),
    "all tokens": lambda rows, g: torch.ones(rows, LENGTH),
    "no rows": lambda rows, g: torch.zeros(rows),
}

# What later batches hold that the first do not
LATE_COLUMNS: dict[str, tuple[str, str]] = {
    "late ignored classes": ("classes", "ignored classes"),
    "late ragged classes": ("token classes", "ragged classes"),
    "late row mask": ("all rows", "row mask"),
    "late token mask": ("all tokens", "token mask"),
    "late optional rows": ("no rows", "row mask"),
    "late positives": ("no class", "two classes"),
    "late holes": ("floats", "with holes"),
    "late repeated ids": ("ids", "repeated ids"),
}


class _Batches:
    """Makes each batch anew: what a step writes into one is gone in the next epoch."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case, self.seed = case, seed

    def __len__(self) -> int:
        return len(self.case.batches)

    def __getitem__(self, index: int) -> Any:
        rows, batch = self.case.batches[index], {}
        for name, column in self.case.columns.items():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {index} {column}".encode()))
            early, late = LATE_COLUMNS.get(column, (column, column))
            batch[name] = COLUMNS[late if index >= LATE else early](rows, generator)
        return self.case.container(batch)


def loader_of(case: Case, seed: int) -> DataLoader:
    """The case's batches, those of every epoch alike."""
    return DataLoader(_Batches(case, seed), batch_size=None)  # pyright: ignore[reportArgumentType]


class Adapted(nn.Module):
    """A frozen linear layer in bfloat16 with a trained adapter of rank 2 in float32, as PEFT adds them up."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.bfloat16().requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.randn(base.out_features, 2) / 2)

    def forward(self, x: Tensor) -> Tensor:
        """Rounded to the base's dtype."""
        frozen = self.base(x.to(self.base.weight.dtype))
        return (frozen + (x.to(self.down.dtype) @ self.down.T) @ self.up.T).to(frozen.dtype)


def with_adapters(module: LightningModule) -> LightningModule:
    """Freeze all in bfloat16 and give every linear layer an adapter."""
    for parameter in module.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.bfloat16()
    for owner in list(module.modules()):
        for name, child in list(owner.named_children()):
            if type(child) is nn.Linear:
                setattr(owner, name, Adapted(child))
    return module
