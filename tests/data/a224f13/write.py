"""Writes the checkpoints beside this file, with lightning_memkit as it was at commit a224f13.

They were written so, with the versions of constraints.txt; `test_checkpoints_of_a224f13.py` resumes from them:

    git worktree add --detach /tmp/old a224f13
    PYTHONPATH=/tmp/old OMP_NUM_THREADS=1 python tests/data/a224f13/write.py
    PYTHONPATH=/tmp/old OMP_NUM_THREADS=1 python -m torch.distributed.run --nproc-per-node=2 --standalone \
        tests/data/a224f13/write.py

A case is a short fit that saves in mid-epoch and goes on. `NAME.ckpt` is its checkpoint. `NAME.after.pt` has the
weights that the uninterrupted run ended with, what plain torch computes here (see `arithmetic`), and the float32
weights of the checkpoint. Only public names are used, so that the same lines run on both versions.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lightning_memkit
from lightning_memkit import (
    FSDP2Strategy,
    GradientRelease,
    LoaderTuner,
    MemoryBudget,
    OnDeviceStrategy,
    PackedDataModule,
    PureBF16Precision,
    StreamingCheckpointIO,
    ZeRO1Strategy,
)
from lightning_memkit.cli import main

FOLDER = Path(__file__).resolve().parent
TEXTS = FOLDER / "texts.jsonl"
SAVED, STEPS = 3, 5  # of at least six batches an epoch
KINDS = 16


class Language(LightningModule):
    """A few parameters of each kind, with dropout; token ids are taken modulo 16 to keep the files small."""

    def __init__(
        self, optimizer: Callable[..., Any] = torch.optim.AdamW, dropout: float = 0.0, **options: Any
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.embedding, self.norm = nn.Embedding(KINDS, 4), nn.LayerNorm(4)
        self.inner, self.head = nn.Linear(4, 8), nn.Linear(8, KINDS, bias=False)
        self.optimizer, self.options = optimizer, {"lr": 1e-2, **options}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, labels = (batch["input_ids"], batch["labels"]) if isinstance(batch, dict) else (batch, batch)
        hidden = F.gelu(self.inner(self.norm(self.embedding(ids % KINDS))))
        logits = self.head(F.dropout(hidden, self.dropout, self.training))[:, :-1].float()
        wanted = torch.where(labels < 0, labels, labels % KINDS)[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters(), **self.options)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class ScheduleFree(Language):
    """A model whose optimizer is switched to train mode, as schedulefree requires."""

    def __init__(self) -> None:
        import schedulefree

        super().__init__(schedulefree.AdamWScheduleFree, warmup_steps=2)

    def on_train_start(self) -> None:
        self.optimizers().train()  # pyright: ignore[reportAttributeAccessIssue]

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), **self.options)


class EightBit(Language):
    """States of 8 bits."""

    def __init__(self) -> None:
        import bitsandbytes

        super().__init__(bitsandbytes.optim.AdamW8bit, min_8bit_size=16)


class Save(Callback):
    """Saves within an epoch, and goes on."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == SAVED:
            trainer.save_checkpoint(self.path)


def packed(**options: Any) -> PackedDataModule:
    """Texts of a file, packed."""
    return PackedDataModule(**{"source": TEXTS, "context": 48, "batch_size": 4, **options})


def streamed() -> PackedDataModule:
    """The same texts as a stream, packed as they come."""

    def texts() -> Iterator[str]:
        yield from (json.loads(line)["text"] for line in TEXTS.read_text(encoding="utf-8").splitlines())

    return packed(source={"train": texts}, packing="stream")


def shuffled() -> DataLoader[Any]:
    """An ordinary DataLoader."""
    ids = torch.randint(KINDS, (32, 12), generator=torch.Generator().manual_seed(1))
    return DataLoader(ids, 4, shuffle=True)  # pyright: ignore[reportArgumentType]


def the_same() -> DataLoader[Any]:
    """One batch, over and over, because a resume begins the epoch of a plain loader again."""
    ids = torch.randint(KINDS, (4, 12), generator=torch.Generator().manual_seed(1))
    return DataLoader(ids.repeat(8, 1), 4)  # pyright: ignore[reportArgumentType]


def kahan(**options: Any) -> dict[str, Any]:
    """What most cases share: compensated weights, their random state, rows in micro-batches of two."""
    return {
        "module": lambda: Language(dropout=0.2),
        "data": packed,
        "plugins": [PureBF16Precision()],
        "strategy": OnDeviceStrategy(),
        "callbacks": [MemoryBudget("1GiB", micro_batch_size=2)],
        **options,
    }


def plain(**options: Any) -> dict[str, Any]:
    """A case without memkit's loader, strategy and budget."""
    return {
        "module": Language,
        "data": the_same,
        "plugins": [PureBF16Precision()],
        "callbacks": [],
        **options,
    }


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "kahan": kahan,
    "streamed_file": lambda: kahan(plugins=[PureBF16Precision(), StreamingCheckpointIO()]),
    "stream": lambda: kahan(data=streamed),
    "sized": lambda: kahan(callbacks=[MemoryBudget("1GiB")], deterministic=True),
    "split_exact": lambda: plain(plugins=[PureBF16Precision("split", states="exact")]),
    "kahan_exact": lambda: plain(plugins=[PureBF16Precision(states="exact")]),
    "stochastic": lambda: plain(plugins=[PureBF16Precision("stochastic")]),
    "none": lambda: plain(plugins=[PureBF16Precision("none", fp32_exceptions=["norm"])]),
    "release": lambda: plain(callbacks=[GradientRelease(clipping="previous")], gradient_clip_val=0.5),  # pyright: ignore
    "tuned_loader": lambda: plain(data=shuffled, callbacks=[LoaderTuner(max_workers=0)]),
    "averaged": lambda: plain(callbacks=[EMAWeightAveraging(decay=0.5)]),
    "eight_bit": lambda: plain(module=EightBit),
    "schedule_free": lambda: plain(module=ScheduleFree),
}
ON_TWO_RANKS: dict[str, Callable[[], dict[str, Any]]] = {
    "fsdp2": lambda: kahan(strategy=FSDP2Strategy(), devices=2),
    "fsdp2_whole": lambda: kahan(
        strategy=FSDP2Strategy(save_distributed_checkpoint=False),
        devices=2,
        plugins=[PureBF16Precision("split")],
    ),
    "zero1": lambda: kahan(strategy=ZeRO1Strategy(), devices=2),
}


def fitted(
    case: dict[str, Any], *, save: Path | None = None, resume: Path | None = None
) -> dict[str, Tensor]:
    """Run a case to its end; return its weights, those of all ranks."""
    case = dict(case)
    torch.manual_seed(0 if resume is None else 1)  # a resume begins elsewhere: all comes from the checkpoint
    module, data = case.pop("module")(), case.pop("data")()
    given: dict[str, Any] = (
        {"datamodule": data} if isinstance(data, PackedDataModule) else {"train_dataloaders": data}
    )
    callbacks = [*case.pop("callbacks"), *([] if save is None else [Save(save)])]
    with algorithms_as_before():
        trainer = Trainer(
            accelerator="cpu", callbacks=callbacks, max_steps=STEPS, limit_val_batches=0, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            **{"devices": 1, **case},
        )  # fmt: skip
        trainer.fit(module, **given, ckpt_path=resume)
    return {name: whole(value) for name, value in module.state_dict().items()}


def whole(value: Any) -> Tensor:
    """A copy of a tensor, gathered from all ranks' shards, which further steps leave unchanged."""
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


@contextmanager
def algorithms_as_before() -> Iterator[None]:
    """A context that undoes what `Trainer(deterministic=True)` sets for the process."""
    before = torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def arithmetic() -> Tensor:
    """Gradients that plain torch computes on this machine, in bfloat16: other processors may round otherwise."""
    torch.manual_seed(0)
    module = Language().bfloat16()
    for size in (4, 2):
        ids = torch.randint(KINDS, (size, 48), generator=torch.Generator().manual_seed(2))
        module.training_step(ids, 0).backward()
    return torch.cat(
        [parameter.grad.flatten() for parameter in module.parameters() if parameter.grad is not None]
    )


def consolidated(path: Path) -> dict[str, Tensor]:
    """The float32 weights that `memkit consolidate` makes of a checkpoint."""
    with TemporaryDirectory() as folder:
        target = Path(folder, "float32.ckpt")
        assert main(["consolidate", str(path), str(target), "--weights-only"]) == 0
        return torch.load(target, weights_only=True)["state_dict"]


def write(names: dict[str, Callable[[], dict[str, Any]]]) -> None:
    """Write the cases' checkpoints and weights; say where this version's own resume differs."""
    for name, case in names.items():
        path = FOLDER / f"{name}.ckpt"
        after = fitted(case(), save=path)
        again = fitted(case(), resume=path)
        differing = [key for key, value in after.items() if not torch.equal(value, again[key])]
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            found = {"weights": after, "arithmetic": arithmetic(), "float32": consolidated(path)}
            torch.save(found, FOLDER / f"{name}.after.pt")
            print(
                name,
                "resumes bit for bit" if not differing else f"resumes otherwise: {differing}",
                flush=True,
            )


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(lightning_memkit.__file__)
    write(ON_TWO_RANKS if torch.distributed.is_torchelastic_launched() else CASES)
    sys.stdout.flush()
