"""Flipped bytes that a load of a checkpoint does not notice, and what checksums add to saving and to loading.

Bytes are flipped one at a time at random places of one file, of a sharded folder's files and of what a thread wrote:
headers, JSON, values, tables of contents. `undetected` counts loads that gave other values than were saved. `*_ratio`
is the time with checksums over that of the same code without: a save to disk; a load up to the end of the optimizer's
first step, which is when a mapped checkpoint is read; `load_alone_ratio` has the load alone, which otherwise reads the
header only, so that it shows the price of reading the file once.
"""

import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_structure

from benchmarks.__main__ import main_of
from benchmarks.harness import MINIMUM_PAIRS, Options, Report, one_thread, paired_ratio, self_ratio_is_void
from lightning_memkit import StreamingCheckpointIO
from lightning_memkit.checkpoints import files
from lightning_memkit.checkpoints.errors import CheckpointError
from lightning_memkit.checkpoints.sharded import gather, load_rest, save_sharded

FLIPS = 500
REST = {"epoch": 3, "global_step": 1200, "loops": {"done": [1, 2, 3]}, "hyper_parameters": {"lr": 0.001}}


def run(options: Options) -> Report:
    """Flip 500 bytes, then time a checkpoint of 300 MB (25 with `--quick`) in pairs."""
    torch.manual_seed(options.seed)
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="memkit-") as folder, one_thread():
        flips = flip(Path(folder), random.Random(options.seed))
        for name, (count, undetected) in flips.items():
            rows.append({"what": name, "flips": count, "undetected": undetected})
        blocks = 2 if options.quick else 25
        ratios = _timed(Path(folder), blocks, options.seed)
    rows += [ratio.row(name) for name, ratio in ratios.items()]
    figures: dict[str, float | int | bool] = {
        "flips": sum(count for count, _ in flips.values()),
        "undetected": sum(undetected for _, undetected in flips.values()),
        "model_bytes": blocks * 3 * 4 * 1024**2,
    }
    for name, ratio in ratios.items():
        figures |= {f"{name}_ratio": ratio.median, f"{name}_low": ratio.low, f"{name}_high": ratio.high}
    notes = (
        "load: load, load_state_dict of module and optimizer, optimizer.step(); the file is in the page cache",
        "self: the load with checksums against itself, which shows the noise",
    )
    void = self_ratio_is_void(ratios["self"])
    missed = figures["undetected"] > 0
    return Report("checkpoint_integrity", figures, rows, void=void, notes=notes, failed=missed)


def flip(folder: Path, dice: random.Random) -> dict[str, tuple[int, int]]:
    """Of each kind of checkpoint, how many bytes were flipped, and how many flips loaded other values."""
    found = {}
    for number, (name, (write, read)) in enumerate(_KINDS.items()):
        place = folder / str(number)
        place.mkdir()
        write(place / "x")
        good = read(place / "x")
        paths = [place / "x"] if (place / "x").is_file() else sorted((place / "x").iterdir())
        count = FLIPS // len(_KINDS) + (number < FLIPS % len(_KINDS))
        missed = [
            _is_missed(paths[turn % len(paths)], place / "x", read, good, dice) for turn in range(count)
        ]
        found[name] = (count, sum(missed))
    return found


def _is_missed(
    damaged: Path, path: Path, read: Callable[[Path], Any], good: Any, dice: random.Random
) -> bool:
    content = damaged.read_bytes()
    place = dice.randrange(len(content))
    changed = bytes([content[place] ^ dice.randrange(1, 256)])
    damaged.write_bytes(content[:place] + changed + content[place + 1 :])
    try:
        return not _same(read(path), good)
    except CheckpointError:
        return False
    finally:
        damaged.write_bytes(content)


def _same(one: Any, other: Any) -> bool:
    if tree_structure(one) != tree_structure(other):
        return False
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=True)
    return all(
        isinstance(b, Tensor) and torch.equal(a, b)
        if isinstance(a, Tensor)
        else type(a) is type(b) and a == b
        for a, b in pairs
    )


def _state() -> dict[str, Any]:
    module = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 4))
    return {"state_dict": dict(module.state_dict()), "optimizer_0": {"lr": 0.001, "exp_avg": torch.randn(9)}}


def _write_in_a_thread(path: Path) -> None:
    io = StreamingCheckpointIO(asynchronous=True)
    io.save_checkpoint({**_state(), **REST}, path)
    io.teardown()


_KINDS: dict[str, tuple[Callable[[Path], None], Callable[[Path], Any]]] = {
    "one file": (lambda path: files.save({**_state(), **REST}, path), files.load),
    "sharded folder": (
        lambda path: save_sharded(_state(), REST, path),
        lambda path: {**gather(path), **load_rest(path)},
    ),
    "written by a thread": (_write_in_a_thread, files.load),
}


def _timed(folder: Path, blocks: int, seed: int) -> dict[str, Any]:
    module = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(blocks)))
    optimizer = torch.optim.AdamW(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = {"state_dict": module.state_dict(), "optimizer_states": [optimizer.state_dict()], **REST}

    def save(checksums: bool) -> None:
        files.save(state, folder / f"{checksums}.ckpt", checksums=checksums)

    def load(checksums: bool) -> Any:
        return files.load(folder / f"{checksums}.ckpt")

    def resume(checksums: bool) -> None:
        loaded = load(checksums)
        module.load_state_dict(loaded["state_dict"])
        optimizer.load_state_dict(loaded["optimizer_states"][0])
        optimizer.step()

    def ratio(step: Callable[[bool], object], peer: bool = False) -> Any:
        return paired_ratio(lambda: step(True), lambda: step(peer), pairs=MINIMUM_PAIRS, seed=seed)

    return {
        "save": ratio(save),
        "load": ratio(resume),
        "load_alone": ratio(load),
        "self": ratio(resume, True),
    }


if __name__ == "__main__":
    raise SystemExit(main_of(__file__))
