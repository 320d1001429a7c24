"""Expert states of the example in 8 bits, and on the host: what is kept where, and what it does to the training."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from bitsandbytes.optim import AdamW8bit
from torch import Tensor
from torch.utils.data import DataLoader

from examples.mixture_of_experts.model import MixtureLM
from lightning_memkit import OnDeviceStrategy, OptimizerOffload
from tests.plugins.fake_accelerator import FakeAccelerator
from tests.plugins.noise import NOISE
from tests.testing.fake_device import fake_device
from tests.testing.needs import NEEDS_COMPILER

pytestmark = NOISE
STEPS = 12


class Mixture(MixtureLM):
    def __init__(self, eight_bit: bool = False) -> None:
        super().__init__(vocabulary_size=64, num_experts=4, top_k=2, width=48, heads=2, layers=2)
        self.optimizer_class: Any = AdamW8bit if eight_bit else torch.optim.AdamW

    def configure_optimizers(self) -> Any:
        return self.optimizer_class(self.parameters(), lr=3e-3)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        rows = torch.arange(32).repeat(8, 1) + torch.randint(0, 32, (STEPS, 8, 1), generator=generator)
        batches: Any = [{"input_ids": ids, "labels": ids} for ids in rows]
        return DataLoader(batches, batch_size=None)


class Watch(pl.Callback):
    """Losses, and of the experts' states dtypes, bytes, and where they are between two steps."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        (optimizer,) = trainer.optimizers
        states = [optimizer.state[p] for name, p in pl_module.named_parameters() if ".experts." in name]
        moments = [
            value
            for state in states
            for name, value in state.items()
            if isinstance(value, Tensor) and value.numel() > 1 and "qmap" not in name
        ]
        self.parameters, self.bytes = len(states), sum(value.nbytes for value in moments)
        self.dtypes = {value.dtype for value in moments}
        self.devices = {value.device.type for value in moments}


def fitted(folder: Path, *callbacks: pl.Callback, eight_bit: bool = False, **options: Any) -> Any:
    """The weights, and what was watched."""
    torch.manual_seed(0)
    module, watch = Mixture(eight_bit), Watch()
    trainer = pl.Trainer(
        **options, max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, callbacks=[*callbacks, watch],
    )  # fmt: skip
    trainer.fit(module)
    return {name: value.cpu() for name, value in module.state_dict().items()}, watch


def test_states_of_experts_are_in_eight_bits(tmp_path: Path) -> None:
    def run(eight_bit: bool) -> Any:
        where: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "strategy": OnDeviceStrategy()}
        return fitted(tmp_path, eight_bit=eight_bit, **where)[1]

    found, plain = run(True), run(False)
    assert found.parameters == 4  # two tensors a block
    assert found.dtypes == {torch.uint8, torch.float32}  # codes, and a scale for each 256
    assert found.bytes == pytest.approx(plain.bytes * (1 + 4 / 256) / 4, rel=0.01)
    assert found.losses[-1] < found.losses[0] - 0.5
    assert found.losses == pytest.approx(plain.losses, rel=0.05)


@NEEDS_COMPILER
def test_states_of_experts_are_on_the_host(tmp_path: Path) -> None:
    def run(*callbacks: pl.Callback) -> Any:
        strategy = OnDeviceStrategy("fake:0", FakeAccelerator())
        return fitted(tmp_path, *callbacks, strategy=strategy, devices=1)

    with fake_device():
        weights, plain = run()
        same, found = run(OptimizerOffload())
    assert plain.devices == {"fake"}
    assert found.devices == {"cpu"}
    assert found.bytes == plain.bytes > 0
    assert found.losses == plain.losses
    for name, value in weights.items():
        assert torch.equal(same[name], value), name
