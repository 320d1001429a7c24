"""Run on ranks by test_several_ranks.py: a module that knows nothing of ranks, trained by some of them."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import lightning_memkit
from lightning_memkit import PureBF16Precision
from lightning_memkit.memory.meter import storages_of
from tests.plugins.ranks import leave

ROWS, LENGTH, STEPS = 8, 12, 8


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.into, self.out = nn.LayerNorm(width), nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(F.gelu(self.into(self.norm(x))))


class Language(LightningModule):
    """Tied weights, a buffer, and a parameter directly on the LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(96, 32)
        self.layers = nn.ModuleList(Block(32) for _ in range(3))
        self.head = nn.Linear(32, 96, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(32))
        self.register_buffer("positions", torch.linspace(-1, 1, LENGTH)[:, None], persistent=False)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        x = self.embedding(batch) + self.positions.to(self.scale.dtype)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x * self.scale)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
                "interval": "step",
            },
        }


class Loader:
    """Of each batch, a rank's rows."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        for _ in range(STEPS):
            yield torch.randint(0, 96, (ROWS, LENGTH), generator=generator)[self.rank :: self.ranks]


class Watch(Callback):
    """Losses, and the bytes that this rank keeps between two steps."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.kept: dict[str, int] = {}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs["loss"].detach().clone()
        if trainer.world_size > 1:
            torch.distributed.all_reduce(loss)
        self.losses.append(float(loss) / trainer.world_size)
        self.kept = {
            "weights": _bytes(pl_module.parameters()),
            "gradients": _bytes(p.grad for p in pl_module.parameters() if p.grad is not None),
            "states": sum(_bytes(_tensors(local(one).state)) for one in trainer.optimizers),
        }


def local(optimizer: Any) -> Any:
    return getattr(optimizer, "optim", optimizer)


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    for values in state.values():
        yield from (
            value for value in values.values() if isinstance(value, torch.Tensor) and value.numel() > 1
        )


def _bytes(tensors: Any) -> int:
    storages = {one._cdata: one.nbytes() for tensor in tensors for one in storages_of(tensor)}
    return sum(storages.values())


def trained(
    strategy: Any, precision: str, ranks: int, rank: int, beside: Sequence[Callback] = (), **options: Any
) -> dict[str, Any]:
    torch.manual_seed(0)
    module, watch = options.pop("kind", Language)(), Watch()
    compensated = {"kahan": [PureBF16Precision()], "split": [PureBF16Precision("split", states="exact")]}
    given: dict[str, Any] = {"precision": precision}
    if precision in compensated:
        given = {"plugins": compensated[precision]}
    resume, saved = options.pop("ckpt_path", None), options.pop("saved", None)
    trainer = Trainer(
        **given, strategy=strategy, **{"max_steps": STEPS, **options}, accelerator="cpu", devices=ranks,
        callbacks=[watch, *beside], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, gradient_clip_val=1.0,
    )  # fmt: skip
    trainer.fit(module, Loader(rank, ranks), ckpt_path=resume)
    if saved is not None:
        trainer.save_checkpoint(saved)
    full = {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).float()
        for name, value in module.state_dict().items()
    }
    return {"losses": watch.losses, "weights": full, "kept": watch.kept}


def strategy_of(name: str, options: dict[str, Any]) -> Any:
    return name if name in ("auto", "ddp") else getattr(lightning_memkit, name)(**options)


class Plain(Language):
    """Its optimizer comes from a config."""

    configure_optimizers = LightningModule.configure_optimizers

    def train_dataloader(self) -> Loader:
        return Loader(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def from_a_config(cli: Any) -> dict[str, Any]:
    """`--optimizer` under FSDP2: how far each weight has moved."""
    torch.manual_seed(0)
    before = {name: value.clone() for name, value in Plain().state_dict().items()}
    words = [
        "fit", "--seed_everything=0", "--trainer.strategy=memkit_fsdp2", "--trainer.accelerator=cpu",
        f"--trainer.devices={os.environ['WORLD_SIZE']}", "--trainer.max_steps=2", "--trainer.logger=false",
        "--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false", "--optimizer=SGD",
        "--optimizer.lr=0.1", "--trainer.use_distributed_sampler=false",
    ]  # fmt: skip
    module = cli(Plain, args=words, save_config_callback=None).model
    return {
        name: float((value.full_tensor() - before[name]).abs().max())
        for name, value in module.state_dict().items()
    }


def main_of_configs(path: str) -> None:
    moved = from_a_config(lightning_memkit.MemkitCLI)
    try:
        from_a_config(LightningCLI)
        refused = ""
    except ValueError as error:
        refused = str(error)
    if int(os.environ["RANK"]) == 0:
        torch.save({"moved": moved, "refused": refused}, path)
    leave()


def main(path: str, name: str, options: str, precision: str) -> None:
    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    found = trained(strategy_of(name, json.loads(options)), precision, ranks, rank)
    if rank == 0:
        torch.save(found, path)
    leave()


if __name__ == "__main__":
    torch.set_num_threads(1)
    (main if len(sys.argv) > 2 else main_of_configs)(*sys.argv[1:])
