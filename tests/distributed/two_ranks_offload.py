# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
"""Run on ranks by test_offload.py: steps of DDP and FSDP2 with activations offloaded, the host as the device.

Then trainers with the strategies of memkit, on ranks whose device is "fake".
"""

import gc
import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import lightning_memkit
from lightning_memkit import (
    ActivationOffload,
    FSDP2Strategy,
    PureBF16Precision,
    StreamingCheckpointIO,
    checkpoint_modules,
)
from lightning_memkit.activations.offload import offload_activations
from tests.activations.offload_models import Deep, host_as_device, ids
from tests.plugins.fake_ranks import BACKEND, on_fake_ranks
from tests.plugins.ranks import leave, whole
from tests.testing.fake_device import FakeDevice, fake_device

# 5 x 7 tokens: no activation has as many elements as a parameter.
ROWS, LENGTH = 5, 7
STEPS = 3  # of trainers
COMPENSATIONS: tuple[tuple[Any, Any], ...] = (("kahan", "compact"), ("split", "exact"))


def built(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = Deep()
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind.startswith("fsdp2"):
        mesh = init_device_mesh("cpu", (2,))
        policy = (
            MixedPrecisionPolicy(torch.bfloat16, torch.float32) if "mixed" in kind else MixedPrecisionPolicy()
        )
        for block in model.blocks:
            if "nested" in kind:  # gathered within the block's forward
                fully_shard(block.mix, mesh=mesh, mp_policy=policy)
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def step(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(3)
    model(ids(ROWS, LENGTH, seed=1 + distributed.get_rank())).float().square().mean().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [(g.full_tensor() if isinstance(g, DTensor) else g).clone() for g in gradients]


def run(kind: str, checkpointed: bool) -> dict[str, Any]:
    model = built(kind)
    plain = step(model)
    undo = checkpoint_modules(model) if checkpointed else lambda: None
    with host_as_device(), offload_activations(model, min_bytes=1, pin_memory=False) as offload:
        ours = [step(model) for _ in range(2)][-1]
        moved = offload.counts.moved_bytes // 2
    undo()
    same = len(ours) == len(plain) and all(map(torch.equal, ours, plain))
    return {"same": same, "moved": moved, "again": all(map(torch.equal, step(model), plain))}


class Module(LightningModule):
    """Its steps are alike, so that the counts of one are those of any."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Deep(dropout=0.0)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.network(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # By the usual epsilon the rounding of a gradient near zero, another one on each CPU, would be a step's size.
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)


class Counts(Callback):
    """Of the last step: bytes that went to the host, what the device holds between two, and what comes on top."""

    def __init__(self, device: FakeDevice, target: Path) -> None:
        gc.collect()
        self.device, self.target, self.found, self.before = device, target, {}, device.live_bytes

    def on_train_batch_start(self, *_: Any) -> None:
        self.device.reset_counts()
        self.device.reset_peak()
        self.found["between"] = self.device.live_bytes - self.before

    def on_train_batch_end(self, *_: Any) -> None:
        self.found["to host"] = self.device.transfers.to_host_bytes
        self.found["hazards"] = self.device.hazards
        self.found["peak"] = self.device.peak_bytes - self.before - self.found["between"]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.found["weights"] = {name: whole(value) for name, value in pl_module.state_dict().items()}
        if isinstance(trainer.strategy, FSDP2Strategy):
            live = self.device.live_bytes
            self.device.reset_peak()
            trainer.save_checkpoint(self.target)
            self.found["save"] = self.device.peak_bytes - live
            for parameter in pl_module.parameters():  # what a thread writes is a copy in the host's memory
                parameter.detach().zero_()


def fitted(device: FakeDevice, target: Path, strategy: Any, *extras: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    counts = Counts(device, target)
    module = Module().to(device.torch_device)
    callbacks = [extra for extra in extras if isinstance(extra, Callback)]
    plugins = [extra for extra in extras if not isinstance(extra, Callback)]
    trainer = Trainer(
        **on_fake_ranks(2), strategy=strategy, callbacks=[*callbacks, counts], max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, plugins=[StreamingCheckpointIO(asynchronous=True), *plugins],
    )  # fmt: skip
    batches = [ids(seed=2 * step + int(os.environ["RANK"])) for step in range(STEPS)]
    trainer.fit(module, DataLoader(batches, batch_size=None))  # pyright: ignore[reportArgumentType]
    return counts.found


def on_one_cpu() -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = Module()
    optimizer = module.configure_optimizers()
    for step in range(STEPS):
        optimizer.zero_grad()
        module.training_step(torch.cat([ids(seed=2 * step + rank) for rank in range(2)]), step).backward()
        optimizer.step()
    return module.state_dict()


def by_trainers(device: FakeDevice, folder: Path) -> dict[str, Any]:
    found = {}
    for name, options in (
        ("FSDP2Strategy", {}),
        ("FSDP2Strategy", {"cpu_offload": True}),
        ("ZeRO1Strategy", {}),
    ):
        for offloads in (False, True):
            strategy = getattr(lightning_memkit, name)(**options, process_group_backend=BACKEND)
            callbacks = [ActivationOffload(min_bytes=4096)] if offloads else []
            key = f"{name} on the host" if options else name
            found[key, offloads] = fitted(device, folder / f"{key} {offloads}", strategy, *callbacks)
    for mode, states in COMPENSATIONS:
        strategy = FSDP2Strategy(cpu_offload=True, process_group_backend=BACKEND)
        precision = PureBF16Precision(mode, states)
        found[mode] = fitted(device, folder / mode, strategy, precision)
    return found


def main(path: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    found: dict[Any, Any] = {
        f"{kind} {checkpointed}": run(kind, checkpointed)
        for kind in ("alone", "ddp", "fsdp2", "fsdp2 nested", "fsdp2 mixed")
        for checkpointed in (False, True)
    }
    distributed.barrier()
    distributed.destroy_process_group()
    with fake_device() as device:
        found |= by_trainers(device, Path(path).parent)
    everywhere: list[Any] = [None, None]
    distributed.all_gather_object(everywhere, found)
    if distributed.get_rank() == 0:
        together = {f"rank {rank}": one for rank, one in enumerate(everywhere)}
        torch.save({**together, "one process": on_one_cpu()}, path)
    leave()


if __name__ == "__main__":
    main(sys.argv[1])
