"""Run on ranks by test_two_ranks_precision.py: trains in pure bfloat16 on two ranks, saves what came out."""

import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.data import DataLoader

from lightning_memkit import PureBF16Precision
from lightning_memkit.optim.compensation import compensation_of
from tests.plugins.ranks import leave
from tests.plugins.toys import trainer

ROWS, STEPS, RANKS = 16, 30, 2
# The compensation, and the states of trainings by prescribed gradients and by the model's own.
KINDS: dict[str, tuple[Any, Any, Any]] = {
    "kahan": ("kahan", "exact", "compact"),
    "split": ("split", "exact", "compact"),
    "split24": ("split24", "exact", "compact"),
    "8-bit": ("split24", "8-bit", "8-bit"),
}


class Net(LightningModule):
    """A regression whose layers are sharded unevenly over the ranks; the loss is a mean over the rows.

    Args:
        early: layers are made at once, in float32; otherwise in `configure_model`, and sharded under FSDP2.
    """

    def __init__(self, early: bool) -> None:
        super().__init__()
        self.layers = self._layers() if early else None

    def configure_model(self) -> None:
        if self.layers is not None:
            return
        self.layers = self._layers()
        if self.device_mesh is not None:
            mesh: Any = self.device_mesh
            for layer in (self.layers[0], self.layers[2], self.layers[4]):
                fully_shard(layer, mesh=mesh["data_parallel"])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert self.layers is not None
        x = batch.to(next(self.layers.parameters()).dtype)
        target = batch.sin().sum(1, keepdim=True)
        return nn.functional.mse_loss(self.layers(x).float(), target)

    def configure_optimizers(self) -> Any:
        weights = [p for p in self.parameters() if p.dim() > 1]
        rest = [{"params": [p for p in self.parameters() if p.dim() == 1], "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW([{"params": weights}, *rest], lr=2e-3, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _layers(self) -> nn.Sequential:
        layers = nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 33), nn.Tanh(), nn.Linear(33, 1))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in layers.parameters():
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
        return layers


class PrescribedGradients(Callback):
    """Every gradient becomes a function of step and name, the same on all ranks."""

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            seed = zlib.crc32(f"{trainer.global_step} {name}".encode())
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            gradient: Any = noise.to(parameter.dtype)
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(
                    gradient, parameter.device_mesh, parameter.placements, src_data_rank=None
                )
            parameter.grad = gradient


def fitted(
    strategy: str = "auto",
    *,
    plugin: PureBF16Precision | None,
    prescribed: bool,
    early: bool,
    folder: Path,
    stop_at: int = STEPS,
    resume: Path | None = None,
) -> tuple[Net, Trainer]:
    """A net after training; with a strategy, on two ranks that each take half of every batch."""
    kinds: dict[str, Any] = {"auto": "auto", "ddp": "ddp", "fsdp2": ModelParallelStrategy(RANKS, 1)}
    ranks = 1 if strategy == "auto" else RANKS
    fitting = trainer(
        *([PrescribedGradients()] if prescribed else []), max_steps=stop_at, devices=ranks,
        strategy=kinds[strategy], plugins=[plugin] if plugin else None, use_distributed_sampler=False,
        default_root_dir=str(folder),
    )  # fmt: skip
    rows = torch.randn(STEPS * ROWS, 8, generator=torch.Generator().manual_seed(1))
    mine = rows.view(STEPS, ranks, ROWS // ranks, 8)[:, fitting.global_rank].flatten(0, 1)
    module = Net(early)
    fitting.fit(module, DataLoader(mine, batch_size=ROWS // ranks), ckpt_path=resume)  # pyright: ignore
    return module, fitting


def everything(module: Net, fitting: Trainer) -> dict[str, Tensor]:
    """Weights, float32 weights and states by name, whole."""
    found: dict[str, Tensor] = {}
    optimizer = fitting.optimizers[0]
    handle = compensation_of(optimizer)
    exact = dict(handle.float32_weights()) if handle else {}
    for name, parameter in module.named_parameters():
        found[name] = whole(parameter)
        found[f"{name} float32"] = whole(exact.get(parameter, parameter)).float()
        for key, value in optimizer.state[parameter].items():
            found[f"{name} {key}"] = whole(value)
    return found


def whole(tensor: Any) -> Tensor:
    if isinstance(tensor, DTensor):  # gloo has no 16-bit integers
        narrow = tensor.dtype == torch.int16
        full = (tensor.int() if narrow else tensor).full_tensor()  # pyright: ignore[reportAttributeAccessIssue]
        tensor = full.short() if narrow else full
    return tensor.detach().clone()


def resumed(strategy: str, folder: Path, plugin: dict[str, Any]) -> tuple[Net, Trainer]:
    """Two fits of half the steps each, with Lightning's own checkpoint between them."""
    options: dict[str, Any] = {"prescribed": True, "early": strategy != "fsdp2", "folder": folder}
    _, first = fitted(strategy, plugin=PureBF16Precision(**plugin), stop_at=STEPS // 2, **options)
    first.save_checkpoint(folder / "half.ckpt")
    return fitted(strategy, plugin=PureBF16Precision(**plugin), resume=folder / "half.ckpt", **options)


def main(path: str, strategy: str) -> None:
    torch.set_num_threads(1)
    folder = Path(path).parent
    early = strategy != "fsdp2"
    found = {}
    for kind, (mode, states, own) in KINDS.items():
        for prescribed in (True, False):
            plugin = PureBF16Precision(mode, states if prescribed else own)
            run = fitted(strategy, plugin=plugin, prescribed=prescribed, early=early, folder=folder)
            found[kind, prescribed] = everything(*run)
        found[kind, "resumed"] = everything(
            *resumed(strategy, folder, {"compensation": mode, "states": states})
        )
    run = fitted(strategy, plugin=None, prescribed=False, early=early, folder=folder)
    found["float32", False] = everything(*run)
    if run[1].global_rank == 0:
        torch.save(found, path)
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
