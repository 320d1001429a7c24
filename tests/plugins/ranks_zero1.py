"""Run on ranks by test_zero1.py: ZeRO-1 with 8-bit states, over equal layers, from float32 files, with averages."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_memkit import FSDP2Strategy, ZeRO1Strategy
from tests.plugins.ranks import leave
from tests.plugins.several_ranks import Language, local, trained


class EightBit(Language):
    """Its embedding keeps 32 bits by bitsandbytes' own means, as it does under the strategies of memkit."""

    def configure_optimizers(self) -> Any:
        from bitsandbytes import optim

        override = {"optim_bits": 32}
        optim.GlobalOptimManager.get_instance().register_module_override(self.embedding, "weight", override)
        return optim.AdamW8bit(self.parameters(), lr=1e-2, weight_decay=0.1, min_8bit_size=256)


class Equal(LightningModule):
    """Sixteen weights of a size, the embedding among them: shares are even."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(15))
        self.embedding = nn.Embedding(96, 96)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embedding(batch)
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class States(Callback):
    """Of this rank's share: the dtype of each parameter's first moment, by name."""

    def __init__(self) -> None:
        self.dtypes: dict[str, str] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, *_: Any) -> None:
        names = {parameter: name for name, parameter in pl_module.named_parameters()}
        self.dtypes = {
            names[parameter]: str(state.get("state1", state.get("exp_avg")).dtype)
            for parameter, state in local(trainer.optimizers[0]).state.items()
            if state
        }


def refusal(ranks: int, rank: int) -> str:
    try:
        trained(FSDP2Strategy(), "32-true", ranks, rank, kind=EightBit)
    except ValueError as error:
        return str(error)
    return ""


def in_eight_bits(ranks: int, rank: int) -> dict[str, Any]:
    states = States()
    found = trained(ZeRO1Strategy(), "32-true", ranks, rank, beside=[states], kind=EightBit)
    return {**found, "dtypes": states.dtypes, "refusal": refusal(ranks, rank)}


def from_float32(folder: Path, ranks: int, rank: int) -> None:
    wide = folder / "float32.ckpt"
    trained(ZeRO1Strategy(), "32-true", ranks, rank, saved=wide)
    for mode in ("split", "kahan"):  # resumed after the last step: saved as it was loaded
        trained(ZeRO1Strategy(), mode, ranks, rank, ckpt_path=wide, saved=folder / f"{mode}.ckpt")


def averaged(folder: Path, ranks: int, rank: int) -> dict[str, Any]:
    found = {}
    for name, strategy in (("ddp", "ddp"), ("zero1", ZeRO1Strategy())):
        averages = EMAWeightAveraging(decay=0.9)
        file = folder / f"averaged {name}.ckpt"
        found[name] = trained(strategy, "split", ranks, rank, beside=[averages], saved=file)["weights"]
    return found


def main(path: str, *words: str) -> None:
    ranks, rank, folder = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]), Path(path).parent
    found: dict[str, Any] = {"equal": trained(ZeRO1Strategy(), "32-true", ranks, rank, kind=Equal)["kept"]}
    if "all" in words:
        found["eight bits"] = in_eight_bits(ranks, rank)
        found["averaged"] = averaged(folder, ranks, rank)
        from_float32(folder, ranks, rank)
    everywhere: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(everywhere, found)
    if rank == 0:
        torch.save(everywhere, path)
    leave()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
