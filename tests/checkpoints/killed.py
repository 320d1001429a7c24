"""Run by test_atomic.py: saves without end, is killed at a random moment, and looks what is left; many times."""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_memkit import StreamingCheckpointIO
from lightning_memkit.checkpoints import atomic
from lightning_memkit.checkpoints.files import load, save

PARTS = 6


def state_of(number: int) -> dict[str, torch.Tensor]:
    """Many tensors, so that a mixture of two saves would show."""
    return {str(part): torch.full((2**17,), number) for part in range(PARTS)}


def save_file(number: int, path: Path) -> None:
    save(state_of(number), path)


def save_folder(number: int, path: Path) -> None:
    with atomic.new_folder(path) as folder:
        (folder / ".metadata").touch()
        for name, tensor in state_of(number).items():
            save(tensor, folder / f"{name}.ckpt")


class Numbers(LightningModule):
    """Its weights are the number of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.parts = torch.nn.ParameterList(torch.zeros(2**18) for _ in range(PARTS))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for part in self.parts:
            part.grad = torch.full_like(part, -1)
        optimizer.step()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1)


class Tell(Callback):
    """Says which step's checkpoint has been asked for, from the third of this run on."""

    def __init__(self, told: int) -> None:
        self.told, self.batches = told, 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.batches += 1
        if self.batches > 3:
            os.write(self.told, trainer.global_step.to_bytes(4, "little"))


def train_without_end(asynchronous: bool, path: Path, told: int) -> None:
    keeper = ModelCheckpoint(
        path.parent, "{step}", "step", mode="max", save_top_k=2, save_last=True, every_n_train_steps=1
    )
    trainer = Trainer(
        max_epochs=-1, accelerator="cpu", devices=1, callbacks=[keeper, Tell(told)], logger=False,
        plugins=[StreamingCheckpointIO(asynchronous=asynchronous)], enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    rows: Any = torch.zeros(10**6, 1)
    last = path if path.exists() else None
    trainer.fit(Numbers(), DataLoader(rows), ckpt_path=last)


def numbers_of_a_trainer(folder: Path) -> dict[str, int]:
    """Of every checkpoint, the one number that all of it has."""
    found = {}
    for path in folder.glob("*.ckpt"):
        state = load(path)
        numbers = {int(number) for part in state["state_dict"].values() for number in part.unique()}
        assert numbers == {state["global_step"]}, (path, numbers)
        found[path.name] = state["global_step"]
    return found


def numbers_in(path: Path) -> set[int]:
    atomic.recover(path)
    if path.is_dir():
        assert len(list(path.glob("*.ckpt"))) == PARTS
        tensors = [load(part) for part in sorted(path.glob("*.ckpt"))]
    else:
        tensors = list(load(path).values())
    return {int(number) for tensor in tensors for number in tensor.unique()}


def save_without_end(saver: Callable[[int, Path], None], path: Path, first: int, told: int) -> None:
    number = first
    while True:
        saver(number, path)
        os.write(told, number.to_bytes(4, "little"))
        number += 1


def killed_once(run: Callable[[int], None], seconds: float) -> int:
    """The number of the last save that was reported before the kill."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        run(writer)
    os.close(writer)
    reported = os.read(reader, 4)  # the first save is done
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while more := os.read(reader, 4):
        reported = more
    os.close(reader)
    return int.from_bytes(reported, "little")


def main_of_trainers(asynchronous: bool, folder: str, kills: str) -> None:
    moments, interrupted = random.Random(0), 0
    for _ in range(int(kills)):
        run = partial(train_without_end, asynchronous, Path(folder, "last.ckpt"))
        reported = killed_once(run, moments.uniform(0, 0.1))
        names = os.listdir(folder)
        interrupted += any(name.endswith(atomic.PARTIAL) for name in names)
        found = numbers_of_a_trainer(Path(folder))
        # A thread may still have been writing the last step's.
        assert max(found.values()) >= reported - asynchronous, (found, reported)
        assert found["last.ckpt"] >= reported - asynchronous, (found, reported)
    print(json.dumps({"interrupted": interrupted, "left": []}))


def main(kind: str, folder: str, kills: str) -> None:
    if kind.startswith("trainer"):
        main_of_trainers("thread" in kind, folder, kills)
        return
    if kind == "folder in two renames":
        atomic._exchange = lambda one, other: False
    saver = save_file if kind == "file" else save_folder
    path, moments, first = Path(folder, "last.ckpt"), random.Random(0), 1
    interrupted = 0
    for _ in range(int(kills)):
        reported = killed_once(partial(save_without_end, saver, path, first), moments.uniform(0, 0.05))
        interrupted += len(list(path.parent.iterdir())) > 1
        found = numbers_in(path)
        # The save that was killed may have put its file in place before it could say so.
        assert found in ({reported}, {reported + 1}), (found, reported)
        first = reported + 2
    saver(first, path)
    assert numbers_in(path) == {first}
    print(json.dumps({"interrupted": interrupted, "left": sorted(os.listdir(folder))}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
