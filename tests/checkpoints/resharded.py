"""Run on ranks by test_resharded.py: FSDP2 saved on some ranks, loaded and resumed on others, all with one batch.

Every rank reads the same rows. A mean over 1, 2 or 4 equal gradients is exact, so that the numbers have to be the same
bit for bit on any of them.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from lightning_memkit import FSDP2Strategy, PureBF16Precision, StreamingCheckpointIO
from tests.plugins.ranks import leave
from tests.plugins.several_ranks import LENGTH, Language

ROWS, EPOCH = 4, 3
CASES = [(what, precision) for what in ("sharded", "full") for precision in ("32-true", "split")]


class Rows:
    """The same on every rank and in every epoch."""

    def __len__(self) -> int:
        return EPOCH

    def __iter__(self) -> Iterator[torch.Tensor]:
        for step in range(EPOCH):
            yield torch.randint(0, 96, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))


class Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(float(outputs["loss"]))


def full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def states_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Every optimizer state, whole, by the parameter's name."""
    module = trainer.strategy.model
    assert module is not None
    optimizer: Any = trainer.optimizers[0]
    state: Any = get_optimizer_state_dict(module, optimizer, options=StateDictOptions(full_state_dict=True))
    return {
        f"{name}/{key}": torch.as_tensor(value)
        for name, values in state.get("state", {}).items()
        for key, value in values.items()
    }


def trained(folder: Path, what: str, precision: str, epochs: int, source: Path | None) -> tuple[Trainer, Any]:
    """Train from a checkpoint, or the start; gives losses, weights and states."""
    torch.manual_seed(0)
    module, losses = Language(), Losses()
    given: Any = {"plugins": [StreamingCheckpointIO(asynchronous=True)]}
    if precision == "split":  # exact states: compact ones are rounded at random
        given["plugins"].append(PureBF16Precision("split", states="exact"))
    trainer = Trainer(
        **given, strategy=FSDP2Strategy(save_distributed_checkpoint=what == "sharded"), max_epochs=epochs,
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), callbacks=[losses], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, Rows(), ckpt_path=source)
    weights = {name: full(value).clone() for name, value in module.state_dict().items()}
    return trainer, {"losses": losses.losses, "weights": weights, "states": states_of(trainer)}


def main(folder: str, kind: str) -> None:
    """`save`: train an epoch and save, and two epochs in one go; `resume`: the second epoch, from what was saved."""
    found = {}
    for what, precision in CASES:
        saved = Path(folder, f"{what}-{precision}.ckpt")
        if kind == "save":
            trainer, found[what, precision, "half"] = trained(Path(folder), what, precision, 1, None)
            for _ in range(2):  # the second takes the place of the first
                trainer.save_checkpoint(saved)
            trainer.strategy.teardown()  # a thread may write still
        source = None if kind == "save" else saved
        _, found[what, precision] = trained(Path(folder), what, precision, 2, source)
    if int(os.environ["RANK"]) == 0:
        torch.save(found, Path(folder, f"{kind}-{os.environ['WORLD_SIZE']}.found"))
    leave()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
