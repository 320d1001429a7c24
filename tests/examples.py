"""What the tests of several examples share: where they are, and a run of one at a tiny size."""

import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path

from lightning_memkit.cli import main

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
QUIET = [
    "--trainer.accelerator=cpu",
    "--trainer.logger=false",
    "--trainer.enable_checkpointing=false",
    "--trainer.enable_progress_bar=false",
    "--trainer.num_sanity_val_steps=0",
    "--trainer.log_every_n_steps=1",
]


def train(example: str, configs: Sequence[str], folder: Path, *options: str) -> None:
    """Run an example's configs as its README does, with options over them; `folder` takes what the run writes."""
    words = [f"--config={EXAMPLES / example / name}" for name in configs]
    assert main(["fit", *words, *QUIET, f"--trainer.default_root_dir={folder}", *options, "--debug"]) == 0


def environment_of_ranks() -> dict[str, str]:
    """For a process that starts ranks of its own: where they meet, at a port that nobody else is given meanwhile.

    Lightning asks for a free one seconds before a rank listens there. Those below 30,000 are no connection's.
    """
    for port in range(10_000 + os.getpid() * 16 % 20_000, 30_000):
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)):
                break
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MASTER_PORT": str(port)}


def losses_in(printed: str) -> list[float]:
    """The training losses of MemoryReport's lines, in order."""
    return [float(found) for found in re.findall(r"\| loss ([\d.]+)", printed)]
