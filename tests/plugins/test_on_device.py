# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
"""What the strategies' contexts build has the values of stock initialisation, then cast; on a device, it is there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from safetensors.torch import save_file
from torch import nn

from lightning_memkit import MemkitCLI, OnDeviceStrategy, PureBF16Precision
from lightning_memkit.plugins.callbacks.initial_weights import InitialWeights
from tests.initialization.test_building import HAND_BUILT, assert_same_parameters, cast, transformers_build
from tests.plugins.fake_accelerator import FakeAccelerator
from tests.plugins.noise import NOISE
from tests.plugins.several_ranks import LENGTH, Language, Loader
from tests.plugins.two_ranks_initial_weights import Late
from tests.testing.fake_device import fake_device
from tests.testing.needs import NEEDS_COMPILER

pytestmark = NOISE
BF16 = torch.bfloat16
POSITIONS = torch.linspace(-1, 1, LENGTH)[:, None]
CLASSES = {
    "buffers": HAND_BUILT["buffers"],
    "default initialisers": lambda: nn.Sequential(
        nn.Linear(64, 32), nn.Conv1d(32, 16, 3), nn.Embedding(16, 8)
    ),
    "tied GPT-2": transformers_build("GPT2LMHeadModel"),
    "BERT": transformers_build("BertForMaskedLM"),
}


def trainer(**options: Any) -> Trainer:
    given: dict[str, Any] = {"accelerator": "cpu", "devices": 1, **options}
    if isinstance(given.get("strategy"), OnDeviceStrategy):
        del given["accelerator"]
    return Trainer(
        **given, max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip


PLACES = {
    "strategy": {"strategy": "memkit", "precision": "bf16-true"},
    "plugin": {"plugins": PureBF16Precision()},
    "both": {"strategy": "memkit", "plugins": PureBF16Precision()},
}


class Built(LightningModule):
    """Built in `configure_model`; notes its values when training begins."""

    def __init__(self, build: Any) -> None:
        super().__init__()
        self.build, self.network = build, None

    def configure_model(self) -> None:
        if self.network is None:
            torch.manual_seed(5)
            self.network = self.build()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


@pytest.mark.filterwarnings("ignore:Casting complex values to real")  # Lightning's bf16-true does
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", CLASSES)
def test_configure_model_and_init_module_give_float32_initialisation_then_cast(name: str, place: str) -> None:
    plain = cast(CLASSES[name])
    module = Built(CLASSES[name])
    trainer(**PLACES[place]).validate(module, Loader(0, 1), verbose=False)
    if (
        name != "buffers" or place != "strategy"
    ):  # Lightning's bf16-true casts the affine vectors of norms, too
        assert_same_parameters(module.network, plain)
    torch.manual_seed(5)
    with trainer(**PLACES[place]).init_module():
        built = CLASSES[name]()
    assert_same_parameters(built, plain)
    for key, value in plain.named_buffers():  # the precision decides about them when the module is set up
        assert torch.equal(built.get_buffer(key), value), key


def on_fake_device(**options: Any) -> Trainer:
    return trainer(strategy=OnDeviceStrategy("fake:0", FakeAccelerator()), **options)


def bytes_of(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in {*module.parameters(), *module.buffers()})


@NEEDS_COMPILER
@pytest.mark.parametrize("name", CLASSES)
def test_init_module_builds_on_the_device_and_the_host_holds_nothing(name: str) -> None:
    plain = cast(CLASSES[name])
    with fake_device() as device:
        with on_fake_device(precision="bf16-true").init_module():
            CLASSES[name]()  # what libraries keep
        before = device.live_bytes
        device.reset_peak()
        device.reset_counts()
        torch.manual_seed(5)
        with on_fake_device(plugins=PureBF16Precision()).init_module():
            module = CLASSES[name]()
        largest = max(parameter.numel() for parameter in module.parameters())
        tables = sum(buffer.nbytes for buffer in module.buffers())
        assert {tensor.device.type for tensor in (*module.parameters(), *module.buffers())} == {"fake"}
        assert device.live_bytes - before == bytes_of(module)
        assert device.peak_bytes - before <= bytes_of(module) + 4 * largest + 2 * tables
        assert device.transfers.to_device_bytes <= 64 + tables
        for key, value in (*plain.named_parameters(), *plain.named_buffers()):
            assert torch.equal(
                dict((*module.named_parameters(), *module.named_buffers()))[key].cpu(), value
            ), key


@NEEDS_COMPILER
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "kahan"])
def test_initial_weights_go_from_the_file_to_the_device(precision: str, tmp_path: Path) -> None:
    torch.manual_seed(11)
    names = [name for name in Language().state_dict() if name != "head.weight"]
    values = {name: torch.randn_like(Language().state_dict()[name]) for name in names}
    save_file(values, tmp_path / "w.safetensors")
    options = {"plugins": [PureBF16Precision()]} if precision == "kahan" else {"precision": precision}
    with fake_device() as device:
        module = Late()
        device.reset_counts()
        callbacks = [InitialWeights(str(tmp_path / "w.safetensors")), Began(device)]
        on_fake_device(**options, callbacks=callbacks).fit(module, Loader(0, 1))
        assert module.was_empty
        dtype = torch.float32 if precision == "32-true" else BF16
        for name, value in values.items():
            assert module.begun[name].device.type == "fake"
            assert torch.equal(module.begun[name].cpu(), value.to(dtype)), name
        assert (
            callbacks[1].to_device_bytes <= sum(value.nbytes for value in values.values()) + POSITIONS.nbytes
        )
        if precision != "bf16-true":
            assert torch.equal(module.first.cpu(), POSITIONS)


class Began(Callback):
    """Notes what crossed to the device before training."""

    def __init__(self, device: Any) -> None:
        self.device = device

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.to_device_bytes = self.device.transfers.to_device_bytes


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.filterwarnings("ignore:.*jsonargparse")
def test_a_config_of_stock_lightning_gives_its_weights_then_cast(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [
        "seed_everything: 3",
        "trainer:",
        "  accelerator: cpu",
        "  logger: false",
        f"  precision: {precision}",
    ]
    (tmp_path / "given.yaml").write_text("\n".join(lines))
    built = {
        cli: cli(Language, args=["--config", "given.yaml"], run=False, save_config_callback=None).model
        for cli in (LightningCLI, MemkitCLI)
    }
    assert next(built[LightningCLI].parameters()).dtype == torch.float32  # it casts when it trains
    ours, dtype = built[MemkitCLI], torch.float32 if precision == "32-true" else BF16
    for name, value in built[LightningCLI].named_parameters():
        assert torch.equal(ours.get_parameter(name), value.to(dtype)), name
    assert ours.head.weight is ours.embedding.weight
    assert torch.equal(ours.positions, POSITIONS)
