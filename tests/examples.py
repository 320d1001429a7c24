"""What the tests of several examples share: where they are, and a run of one at a tiny size."""

import re
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


def losses_in(printed: str) -> list[float]:
    """The training losses of MemoryReport's lines, in order."""
    return [float(found) for found in re.findall(r"\| loss ([\d.]+)", printed)]
