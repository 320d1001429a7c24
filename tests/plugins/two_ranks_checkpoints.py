"""Run on ranks by test_two_ranks_checkpoints.py: saves whole and sharded checkpoints, resumes, consolidates."""

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.utils.data import DataLoader

from lightning_memkit import PureBF16Precision
from lightning_memkit.optim.consolidated_files import consolidate_file
from tests.plugins.ranks import leave
from tests.plugins.toys import trainer
from tests.plugins.two_ranks_precision import Net, everything

# Mode, and whether it is a file of its own.
CASES = (
    ("kahan", True),
    ("split", True),
    ("split", False),
    ("split24", True),
    ("split24", False),
    ("stochastic", True),
    ("8-bit", True),
    ("8-bit", False),
)


def fitted(strategy: str, mode: str, whole: bool, epochs: int, resume: Path | None, folder: Path) -> Any:
    kinds: dict[str, Any] = {
        "ddp": "ddp",
        "fsdp2": ModelParallelStrategy(2, 1, save_distributed_checkpoint=not whole),
    }
    fitting = trainer(
        max_steps=-1,
        max_epochs=epochs,
        devices=2,
        strategy=kinds[strategy],
        plugins=[
            PureBF16Precision("split24", "8-bit") if mode == "8-bit" else PureBF16Precision(mode)  # pyright: ignore
        ],
        default_root_dir=str(folder),
    )
    torch.manual_seed(0)
    module = Net(early=strategy == "ddp")
    rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    data = DataLoader(rows, batch_size=8)  # pyright: ignore[reportArgumentType]
    fitting.fit(module, data, ckpt_path=resume, weights_only=True if resume and whole else None)
    return module, fitting


def main(path: str, strategy: str) -> None:
    torch.set_num_threads(1)
    folder, found = Path(path).parent, {}
    for mode, whole in CASES:
        saved = folder / f"{mode}-{whole}.ckpt"
        half = fitted(strategy, mode, whole, 1, None, folder)
        half[1].save_checkpoint(saved)
        found[mode, whole, "half"] = everything(*half)
        found[mode, whole, "straight"] = everything(*fitted(strategy, mode, whole, 2, None, folder))
        found[mode, whole, "resumed"] = everything(*fitted(strategy, mode, whole, 2, saved, folder))
    if half[1].global_rank == 0:
        for mode, whole in CASES:
            if whole:
                plain = consolidate_file(folder / f"{mode}-{whole}.ckpt", folder / f"{mode}.fp32.ckpt")
                found[mode, whole, "consolidated"] = torch.load(plain, weights_only=True)["state_dict"]
        torch.save(found, path)
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
