"""A model with a precision, an optimizer and a policy, whose training is predicted and measured."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from benchmarks._prediction_models import Subject
from lightning_memkit import ActivationCheckpointing, PureBF16Precision

PRECISIONS = ("float32", "bf16-mixed", "bfloat16, Kahan")
OPTIMIZERS = ("AdamW loop", "AdamW foreach", "AdamW fused", "SGD", "AdamW8bit")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What is trained, and how."""

    subject: Subject
    precision: str
    optimizer: str
    policy: str
    micro_batch: int


class Trained(LightningModule):
    """Any model with a loss, and an optimizer by name."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.cell = cell
        self.model = cell.subject.build()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The subject's loss."""
        loss = self.cell.subject.loss(self.model, batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Optimizer:
        """The cell's optimizer."""
        parameters, name = self.parameters(), self.cell.optimizer
        if name == "AdamW8bit":
            from bitsandbytes.optim import AdamW8bit

            return AdamW8bit(parameters, lr=1e-3)
        if name == "SGD":
            return SGD(parameters, lr=1e-3, momentum=0.9)
        kind = name.rpartition(" ")[2]
        return AdamW(parameters, lr=1e-3, foreach=kind == "foreach", fused=kind == "fused")


class Batches:
    """Two batches, one after the other, as a loader would make them."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[Any]:
        for _ in range(2):
            yield self.cell.subject.batch(self.cell.micro_batch)


def trainer_options(cell: Cell) -> dict[str, Any]:
    """The plugins of a cell."""
    options: dict[str, Any] = {}
    if cell.precision == "bf16-mixed":
        options["precision"] = "bf16-mixed"
    elif cell.precision != "float32":
        options["plugins"] = [PureBF16Precision()]
    if cell.policy != "none":
        options["callbacks"] = [ActivationCheckpointing(cell.policy)]
    return options
