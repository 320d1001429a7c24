"""Run on ranks by test_package.py: strategies beside other plugins, trained, and resumed from a checkpoint."""

import json
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.plugins.ranks import leave, whole
from tests.test_package import COMBINATIONS_ON_FAKE_RANKS, COMBINATIONS_ON_RANKS, fit
from tests.testing.fake_device import fake_device


def trained(
    names: tuple[str, ...], folder: Path, epochs: int, resume: Path | None = None
) -> dict[str, torch.Tensor]:
    _, weights = fit(names, folder, epochs, resume)
    return {name: whole(value) for name, value in weights.items()}


def verdict(names: tuple[str, ...], folder: Path) -> str:
    """Empty where the resumed run ends with the very weights of the one in one go."""
    straight = trained(names, folder / "straight", 2)
    begun = trained(names, folder / "half", 1)
    resumed = trained(names, folder / "half", 2, folder / "half" / "1.ckpt")
    if all(torch.equal(begun[name], straight[name]) for name in straight):
        return "nothing was trained in the second epoch"
    differing = [name for name in straight if not torch.equal(resumed[name], straight[name])]
    return f"resumed otherwise: {differing}" if differing else ""


def verdicts(combinations: Sequence[tuple[str, ...]], folder: Path) -> dict[str, str]:
    found = {}
    for names in combinations:
        try:
            found["+".join(names)] = verdict(names, folder / "+".join(names))
        except Exception:
            found["+".join(names)] = traceback.format_exc()[-2000:]
            print(
                "+".join(names), found["+".join(names)], file=sys.stderr, flush=True
            )  # the other rank may wait
    return found


def main(folder: str, every: int) -> None:
    warnings.simplefilter("ignore")
    found = verdicts(COMBINATIONS_ON_RANKS[::every], Path(folder))
    torch.distributed.barrier()
    world = torch.distributed.distributed_c10d._world
    named = world.group_count
    torch.distributed.destroy_process_group()  # that of the CPU's; the next trainer makes another device's
    # torch now names groups from "0" again, and under these names the launcher's store still has the sockets of those
    # before: a rank that reads one before its peer has written the new one would knock at a closed port.
    world.group_count = named
    with fake_device():
        found |= verdicts(COMBINATIONS_ON_FAKE_RANKS[::every], Path(folder))
    if torch.distributed.get_rank() == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]))
