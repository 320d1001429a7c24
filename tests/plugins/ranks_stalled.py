"""Run by test_stalled_ranks.py on each rank: the last rank is stopped (SIGSTOP); the others write when they ended."""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memkit import FSDP2Strategy, MemoryBudget, StreamingCheckpointIO, ZeRO1Strategy
from lightning_memkit.checkpoints import sharded

STRATEGIES: dict[str, Any] = {"ddp": DDPStrategy, "zero1": ZeRO1Strategy, "fsdp2": FSDP2Strategy}
HAS_FAILED: list[bool] = []  # a retry puts the module's own attributes back
LATER = 3  # the batch at which a rank stops or runs out of memory


class Toy(LightningModule):
    """Stops its rank where it is told to, as a process that hangs in a file system or a debugger does."""

    def __init__(self, place: str, stops: bool, folder: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.place, self.stops, self.folder = place, stops, folder
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += 1
        self.stop("sizing", self.calls == 2)
        if self.place.startswith("recovery") and batch_idx == LATER:
            fails = self.stops if self.place == "recovery-own" else not self.stops
            if HAS_FAILED or not fails:
                self.stop(self.place)  # `recovery-own` in its retry, `recovery-peers` where peers fail
            elif fails:
                HAS_FAILED.append(True)
                raise torch.OutOfMemoryError("made to fail")
        self.stop("training", batch_idx == LATER)
        return self.loss(batch[0])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.stop("evaluation", batch_idx == 1)
        self.log("val", self.loss(batch[0]), sync_dist=True)

    def loss(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.stop("saving")

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def stop(self, place: str, here: bool = True) -> None:
        if self.stops and here and place == self.place:
            Path(self.folder, "stopped").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGSTOP)


def trainer_of(folder: str, words: dict[str, Any]) -> Trainer:
    timeout = timedelta(seconds=words["timeout"])
    strategy = STRATEGIES[words["strategy"]](process_group_backend="gloo", timeout=timeout)
    callbacks: list[Callback] = []
    if words["budget"]:
        callbacks.append(MemoryBudget("4GiB"))
    saves = words["place"].startswith("saving")
    if saves:
        callbacks.append(ModelCheckpoint(folder, every_n_train_steps=LATER, save_top_k=-1))
    return Trainer(
        strategy=strategy, accelerator="cpu", devices=words["ranks"], max_steps=8, callbacks=callbacks, logger=False,
        plugins=[StreamingCheckpointIO(asynchronous=words["place"] == "saving-thread")],
        enable_checkpointing=saves, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, val_check_interval=4,
    )  # fmt: skip


def main(folder: str, given: str) -> None:
    words, rank = json.loads(given), int(os.environ["LOCAL_RANK"])
    torch.manual_seed(0)
    module = Toy(words["place"], rank == words["stops"], folder)
    if words["place"] == "saving-thread":
        save = sharded.save_sharded

        def stopping(*arguments: Any) -> None:
            module.stop("saving-thread")
            save(*arguments)

        sharded.save_sharded = stopping
    rows = DataLoader(TensorDataset(torch.randn(64 * words["ranks"], 8)), batch_size=8)
    told = "nothing"
    try:
        trainer_of(folder, words).fit(module, rows, rows)
    except BaseException as error:
        told = f"{type(error).__name__}: {error}"
    Path(folder, f"{rank}.json").write_text(json.dumps({"ended": time.monotonic(), "told": told}))
    os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
