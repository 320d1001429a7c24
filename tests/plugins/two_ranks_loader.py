"""Run on ranks by test_two_ranks_loader.py: two ranks whose loaders and steps take different times."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_memkit import LoaderTuner
from lightning_memkit.data.loading.host_memory import HostMemory
from lightning_memkit.data.loading.load_times import LoadTimes
from lightning_memkit.plugins.data import _training_loaders, loader_tuner
from tests.data.test_loader_tuning import simulated
from tests.plugins.ranks import leave
from tests.plugins.toys import trainer

# Seconds of loading and of a step: rank 0 alone would take 2 workers, rank 1 alone none; together 3.
SECONDS = ((0.1, 0.1), (0.001, 0.06))


class Notes(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[float] = []

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        self.seen += batch.flatten().tolist()
        return self.layer(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    much = HostMemory(shared_bytes=2**40, ram_bytes=2**40)
    for module in (loader_tuner, _training_loaders):
        setattr(module, "host_room", lambda *_: much)  # noqa: B010
    loader_tuner.usable_processors = lambda: 32.0
    used: list[int] = []

    class Said(LoadTimes):
        start_wait = 0.0

        def measured(self, warm_up: int = 0) -> Any:
            return simulated(tuner.plan, *SECONDS[rank])

    class Looks(Notes):
        def on_train_batch_start(self, *_: Any) -> None:
            used.append(tuner.plan.num_workers)

    loader_tuner.LoadTimes = Said
    found = {}
    for resume in (None, str(folder / "saved.ckpt")):
        used.clear()
        torch.manual_seed(0)
        tuner, network = LoaderTuner(), Looks()
        fitted = trainer(tuner, max_steps=20 if resume is None else 32, devices=2, strategy="ddp")
        samples = torch.arange(128.0).view(-1, 1)
        fitted.fit(network, DataLoader(samples, batch_size=2, shuffle=True), ckpt_path=resume)  # pyright: ignore[reportArgumentType]
        if resume is None:
            fitted.save_checkpoint(folder / "saved.ckpt")
        found["resumed" if resume else "first"] = {"used": list(used), "seen": network.seen}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
