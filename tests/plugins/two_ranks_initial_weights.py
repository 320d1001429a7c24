"""Run on ranks by test_initial_weights.py: modules start from weights in files, on two ranks."""

import os
import sys
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.distributed.tensor import DTensor

from lightning_memkit import FSDP2Strategy, MemkitCLI, PureBF16Precision
from lightning_memkit.distributed.shards import local_box, local_part
from lightning_memkit.initialization.building import build_empty
from lightning_memkit.optim.split import LOW_HALF
from lightning_memkit.plugins.callbacks.initial_weights import InitialWeights
from tests.plugins.ranks import leave
from tests.plugins.several_ranks import Language, Loader


class Early(Language):
    """Built in its constructor; notes its weights when training begins."""

    def on_fit_start(self) -> None:
        self.begun = {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
            for name, value in self.state_dict().items()
        }
        self.first = self.get_buffer("positions").clone()
        states: Any = self.trainer.optimizers[0].state
        self.low_parts = {
            name: (local_box(states[parameter][LOW_HALF]), local_part(states[parameter][LOW_HALF]).clone())
            for name, parameter in self.named_parameters()
            if LOW_HALF in states.get(parameter, {})
        }


class Late(Early):
    """Built in `configure_model`."""

    def __init__(self) -> None:
        super(Language, self).__init__()
        self.was_empty = False

    def configure_model(self) -> None:
        if not hasattr(self, "layers"):
            built = Language()
            self.embedding, self.layers, self.head, self.scale = (
                built.embedding, built.layers, built.head, built.scale
            )  # fmt: skip
            self.register_buffer("positions", built.get_buffer("positions"), persistent=False)
            self.was_empty = all(parameter.is_meta for parameter in self.parameters())


class Empty(Late):
    """Without weights from files: its modules' own initialisers fill the shards."""

    def configure_model(self) -> None:
        with build_empty("cpu"):
            super().configure_model()

    def reset_parameters(self) -> None:
        self.scale.detach().fill_(1)


class Configured(Early):
    """Built by a config."""

    def __init__(self) -> None:
        super().__init__()
        self.was_empty = all(parameter.is_meta for parameter in self.parameters())

    def train_dataloader(self) -> Loader:
        return Loader(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def configured(source: str) -> Configured:
    words = [f"--trainer.{one}=false" for one in ("logger", "enable_checkpointing", "enable_progress_bar")]
    words += ["--trainer.strategy=memkit_fsdp2", "--trainer.accelerator=cpu", "--trainer.devices=2"]
    words += ["--trainer.max_steps=1", "--trainer.use_distributed_sampler=false", "--seed_everything=0"]
    words += [f"--trainer.callbacks=[{{class_path: InitialWeights, init_args: {{source: {source}}}}}]"]
    return MemkitCLI(Configured, args=["fit", *words], save_config_callback=None).model  # pyright: ignore


def fit(module: Any, strategy: Any, source: str, precision: str = "32-true", **options: Any) -> Any:
    given: dict[str, Any] = {"precision": precision}
    if precision in ("kahan", "split"):
        given = {"plugins": [PureBF16Precision(compensation=precision)]}  # pyright: ignore[reportArgumentType]
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    trainer = Trainer(
        **given, strategy=strategy, max_steps=1, accelerator="cpu", devices=ranks,
        callbacks=[InitialWeights(source, **options)] if source else [], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, Loader(rank, ranks))
    return module


def main(path: str, source: str) -> None:
    found: dict[str, Any] = {}
    cases = {
        "FSDP2, early": (Early, FSDP2Strategy(), "32-true"),
        "FSDP2, late": (Late, FSDP2Strategy(), "bf16-true"),
        "FSDP2, late, Kahan": (Late, FSDP2Strategy(), "kahan"),
        "FSDP2, early, split": (Early, FSDP2Strategy(), "split"),
        "FSDP2, late, offloaded": (Late, FSDP2Strategy(cpu_offload=True), "32-true"),
        "DDP, early": (Early, "ddp", "32-true"),
        "DDP, late": (Late, "ddp", "32-true"),
    }
    for name, (kind, strategy, precision) in cases.items():
        torch.manual_seed(0)
        module = fit(kind(), strategy, source, precision)
        found[name] = {
            "begun": module.begun, "positions": module.first, "was_empty": getattr(module, "was_empty", False),
            "low": module.low_parts,
        }  # fmt: skip
    module = configured(source)
    found["FSDP2, config"] = {"begun": module.begun, "positions": module.first, "was_empty": module.was_empty}
    for kind, precision in ((Early, "bf16-true"), (Early, "split"), (Late, "kahan"), (Late, "32-true")):
        torch.manual_seed(0)  # as the config's, to which Lightning goes back
        module = fit(kind(), FSDP2Strategy(), "", precision)
        found[f"initialised, {kind.__name__}, {precision}"] = module.begun
    torch.manual_seed(5)
    found["own"] = fit(Empty(), FSDP2Strategy(), "").begun
    try:
        fit(Late(), FSDP2Strategy(), source, rename={"scale": None})
    except Exception as error:
        found["refused"] = repr(error)
    if int(os.environ["RANK"]) == 0:
        torch.save(found, path)
    leave()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
