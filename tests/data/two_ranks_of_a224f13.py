"""Run on ranks by test_checkpoints_of_a224f13.py: resumes from the checkpoints of two ranks."""

import sys
from pathlib import Path

import torch

from tests.data.a224f13.write import ON_TWO_RANKS, fitted
from tests.plugins.ranks import leave


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    found = {name: fitted(case(), resume=folder / f"{name}.ckpt") for name, case in ON_TWO_RANKS.items()}
    if torch.distributed.get_rank() == 0:
        torch.save(found, folder / "found.pt")
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
