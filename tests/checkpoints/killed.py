"""Run by test_atomic.py: saves without end, is killed at a random moment, and looks what is left; many times."""

import json
import os
import random
import signal
import socket
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

from lightning_memkit import FSDP2Strategy, StreamingCheckpointIO
from lightning_memkit.checkpoints import atomic
from lightning_memkit.checkpoints.files import load, save
from lightning_memkit.checkpoints.sharded import gather, is_sharded, load_rest

PARTS, RANKS = 6, 2


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
        optimizer: Any = self.optimizers()
        for part in optimizer.param_groups[0]["params"]:  # sharded or not
            part.grad = torch.full_like(part, -1)
        optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1)


class Tell(Callback):
    """Says which step's checkpoint has been asked for, from the third of this run on."""

    def __init__(self, told: int) -> None:
        self.told, self.batches = told, 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.batches += 1
        if self.batches > 3 and trainer.is_global_zero:
            os.write(self.told, trainer.global_step.to_bytes(4, "little"))


def train_without_end(asynchronous: bool, ranks: int, path: Path, told: int) -> None:
    keeper = ModelCheckpoint(
        path.parent, "{step}", "step", mode="max", save_top_k=2, save_last=True, every_n_train_steps=1
    )
    trainer = Trainer(
        max_epochs=-1, accelerator="cpu", devices=ranks, callbacks=[keeper, Tell(told)], logger=False,
        strategy=FSDP2Strategy() if ranks > 1 else "auto",
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
        state = {**gather(path), **load_rest(path)} if is_sharded(path) else load(path)
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


def killed_once(run: Callable[[int], None], seconds: float, ranks: int = 1) -> int:
    """The number of the last save that was reported before the kill."""
    reader, writer = os.pipe()
    children = [forked(run, rank, ranks, port, writer) for port in [free_port()] for rank in range(ranks)]
    os.close(writer)
    reported = os.read(reader, 4)  # the first save is done
    time.sleep(seconds)
    for child in random.sample(children, ranks):
        os.kill(child, signal.SIGKILL)
    for child in children:
        os.waitpid(child, 0)
    while more := os.read(reader, 4):
        reported = more
    os.close(reader)
    return int.from_bytes(reported, "little")


def forked(run: Callable[[int], None], rank: int, ranks: int, port: int, writer: int) -> int:
    """A process of its own that begins where this one is; as torchrun would start it where there are several."""
    child = os.fork()
    if child:
        return child
    if ranks > 1:
        settings = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        settings |= {
            "GROUP_RANK": 0,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "TORCHELASTIC_RUN_ID": 0,
        }
        os.environ.update({name: str(value) for name, value in settings.items()})
    try:
        run(writer)
    finally:
        os._exit(1)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def main_of_trainers(asynchronous: bool, ranks: int, folder: str, kills: str) -> None:
    moments, interrupted = random.Random(0), 0
    for _ in range(int(kills)):
        run = partial(train_without_end, asynchronous, ranks, Path(folder, "last.ckpt"))
        reported = killed_once(run, moments.uniform(0, 0.1), ranks)
        names = os.listdir(folder)
        interrupted += any(name.endswith(atomic.PARTIAL) for name in names)
        found = numbers_of_a_trainer(Path(folder))
        # A thread may still have been writing the last step's.
        assert max(found.values()) >= reported - asynchronous, (found, reported)
        assert found["last.ckpt"] >= reported - asynchronous, (found, reported)
    print(json.dumps({"interrupted": interrupted, "left": []}))


def main(kind: str, folder: str, kills: str) -> None:
    if kind.startswith(("trainer", "ranks")):
        main_of_trainers("thread" in kind, RANKS if "ranks" in kind else 1, folder, kills)
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
