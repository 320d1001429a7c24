"""A model whose embedding has too few rows is told which, whatever its class, before its first step."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

from lightning_memkit import MemoryBudget, PackedBatch, PackedDataModule
from tests.plugins.noise import NOISE

pytestmark = NOISE
TEXTS = [f"document number {number} of a few" for number in range(40)]


class Own(LightningModule):
    """Of no library: token and position embeddings with names of its own."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.places = nn.Embedding(64, 8)
        self.inner = nn.ModuleDict({"words": nn.Embedding(words, 8)})
        self.head = nn.Linear(8, words)
        self.steps = 0

    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        ids = batch["input_ids"]
        x = self.inner["words"](ids) + self.places(torch.arange(ids.shape[-1], device=ids.device))
        return F.cross_entropy(self.head(x).flatten(0, -2), batch["labels"].flatten(), ignore_index=-100)

    def validation_step(self, batch: PackedBatch, batch_idx: int) -> None:
        """The data module has documents for it."""
        self.training_step(batch, batch_idx)

    test_step = predict_step = validation_step

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.steps += 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Stream(IterableDataset):
    """Of which nobody knows the largest id."""

    def __iter__(self) -> Any:
        return iter(TEXTS)


def fit(module: Own, *callbacks: Callback, source: Any = TEXTS, packing: Any = "bfd") -> Trainer:
    trainer = Trainer(
        accelerator="cpu", max_steps=3, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=list(callbacks), limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(module, datamodule=PackedDataModule(source, context=64, packing=packing))
    return trainer


def hooks_of(module: nn.Module) -> int:
    return sum(len(part._forward_pre_hooks) for part in module.modules())


@pytest.mark.parametrize("callbacks", [(), ("1GiB",)], ids=["alone", "within a budget"])
def test_the_embedding_is_named(callbacks: tuple[str, ...]) -> None:
    module = Own(100)
    rule = (
        r"token ids up to 258 \(tokenizer='bytes'\), and the embedding inner\.words has 100 rows\. Build the model "
        r"with vocab_size=259 or more"
    )
    with pytest.raises(ValueError, match=rule):
        fit(module, *map(MemoryBudget, callbacks))
    assert module.steps == 0
    assert not hooks_of(module)


@pytest.mark.parametrize("what", ["validate", "test", "predict"])
@pytest.mark.parametrize(
    ("source", "packing"), [(TEXTS, "bfd"), (Stream(), "stream")], ids=["documents", "stream"]
)
def test_so_it_is_in_an_evaluation_without_a_fit(what: str, source: Any, packing: Any) -> None:
    module, trainer = Own(100), Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    data = PackedDataModule(
        {"validation": source, "test": source, "predict": source}, context=64, packing=packing
    )
    with pytest.raises(ValueError, match=r"token ids up to \d+ .*the embedding inner\.words has 100 rows"):
        getattr(trainer, what)(module, datamodule=data)
    assert not hooks_of(module)


def test_so_it_is_in_the_check_before_training() -> None:
    trainer = Trainer(
        accelerator="cpu", max_steps=3, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    data = PackedDataModule({"train": TEXTS, "validation": Stream()}, context=64, packing="stream")
    module = Own(100)
    with pytest.raises(ValueError, match=r"the embedding inner\.words has 100 rows"):
        trainer.fit(module, datamodule=data)
    assert not hooks_of(module)


def test_so_it_is_where_documents_are_a_stream() -> None:
    module = Own(100)
    with pytest.raises(
        ValueError, match=r"token ids up to \d+ \(tokenizer='bytes'\), and the embedding inner\.words has"
    ):
        fit(module, source={"train": Stream()}, packing="stream")
    assert module.steps == 0
    assert not hooks_of(module)


def test_one_with_enough_rows_trains_and_is_watched_no_longer() -> None:
    module, seen = Own(259), list[int]()

    class Counts(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            seen.append(hooks_of(pl_module))

    fit(module, Counts())
    assert seen == [2, 0, 0]
    assert module.steps == 3


def test_compiled_modules_are_left_alone() -> None:
    module, seen = Own(259), list[int]()
    module.inner["words"].compile(backend="eager")

    class Counts(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            seen.append(hooks_of(pl_module))

    fit(module, Counts())
    assert seen == [0, 0, 0]
