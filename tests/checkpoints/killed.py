"""Run by test_atomic.py: saves without end, is killed at a random moment, and looks what is left; many times."""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

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


def killed_once(saver: Callable[[int, Path], None], path: Path, first: int, seconds: float) -> int:
    """The number of the last save that was reported before the kill."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        save_without_end(saver, path, first, writer)
    os.close(writer)
    reported = os.read(reader, 4)  # the first save is done
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while more := os.read(reader, 4):
        reported = more
    os.close(reader)
    return int.from_bytes(reported, "little")


def main(kind: str, folder: str, kills: str) -> None:
    if kind == "folder in two renames":
        atomic._exchange = lambda one, other: False
    saver = save_file if kind == "file" else save_folder
    path, moments, first = Path(folder, "last.ckpt"), random.Random(0), 1
    interrupted = 0
    for _ in range(int(kills)):
        reported = killed_once(saver, path, first, moments.uniform(0, 0.05))
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
