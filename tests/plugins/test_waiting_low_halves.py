"""Low halves that wait for states in host memory: whatever happens before, training starts from float32 weights."""

import copy
import pickle

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memkit import OptimizerOffload, PureBF16Precision
from lightning_memkit.optim import state_home
from tests.plugins.fake_accelerator import on_fake_device
from tests.plugins.noise import NOISE
from tests.testing.fake_device import fake_device
from tests.testing.needs import NEEDS_COMPILER

pytestmark = [*NOISE, NEEDS_COMPILER, pytest.mark.filterwarnings("ignore:.*frees nothing")]
# Of the float32 value, what a mode may lose where low halves take its form.
LOST = {"kahan": 2**-17, "split24": 2**-15, "split": 0.0}


class Layers(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
        self.lr = 1e-3

    def training_step(self, batch, batch_idx):
        return self.layers(batch[0]).float().square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Start(Callback):
    """What training starts from."""

    def on_before_optimizer_step(self, trainer, module, optimizer):
        if not hasattr(self, "weights"):
            (compensation,) = trainer.precision_plugin.compensations
            self.weights = [wide.cpu().clone() for _, wide in compensation.float32_weights()]


class Fails(Callback):
    def on_fit_start(self, trainer, module):
        raise RuntimeError("before states are offloaded")


class OffloadsByItself(Callback):
    """Says that it offloads, and tells nobody when."""

    offloads_states = True


def fit(module, plugin, *callbacks, **options):
    trainer = Trainer(
        **(options or {"accelerator": "cpu"}),
        max_steps=2,
        plugins=[plugin],
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader(TensorDataset(torch.randn(16, 64)), batch_size=4)
    trainer.fit(module, data)


def assert_starts_from(start: Start, wide: list[torch.Tensor], mode: str) -> None:
    for found, expected in zip(start.weights, wide, strict=True):
        assert ((found - expected).abs() <= LOST[mode] * expected.abs()).all()


@pytest.fixture
def module() -> Layers:
    return Layers()


@pytest.fixture
def wide(module: Layers) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


@pytest.mark.parametrize("mode", LOST)
@pytest.mark.parametrize("again", [lambda: [OptimizerOffload()], lambda: []], ids=["offloaded", "not"])
def test_a_fit_that_failed_before_is_retried_from_float32(mode, again, module, wide):
    plugin = PureBF16Precision(mode)
    with pytest.raises(RuntimeError, match="before states are offloaded"):
        fit(module, plugin, Fails(), OptimizerOffload())
    start = Start()
    fit(module, plugin, start, *again())
    assert_starts_from(start, wide, mode)
    (compensation,) = plugin.compensations
    trained = [one.clone() for _, one in compensation.float32_weights()]
    later = Start()
    fit(module, plugin, later, *again())
    assert_starts_from(later, trained, mode)  # what was captured first is not taken again


@pytest.mark.parametrize("mode", LOST)
def test_a_search_for_the_learning_rate_comes_before(mode, module, wide, tmp_path):
    plugin, start = PureBF16Precision(mode), Start()
    options = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
    }
    trainer = Trainer(
        **options,
        max_steps=2,
        plugins=[plugin],
        callbacks=[OptimizerOffload(), start],
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    data = DataLoader(TensorDataset(torch.randn(16, 64)), batch_size=4)
    Tuner(trainer).lr_find(module, data, num_training=4, update_attr=False)
    vars(start).clear()
    trainer.fit(module, data)
    assert_starts_from(start, wide, mode)


@pytest.mark.parametrize("mode", LOST)
def test_a_callback_that_tells_nobody_is_not_waited_for(mode, module, wide):
    start = Start()
    fit(module, PureBF16Precision(mode), OffloadsByItself(), start)
    assert_starts_from(start, wide, mode)


@pytest.mark.parametrize("mode", LOST)
def test_no_room_in_pinned_memory_loses_nothing(mode, module, wide, monkeypatch):
    # Parameters stay the same objects on their way to the device, as on the way to CUDA.
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    real, taken = state_home._host_room, []

    def room(like, pinned):
        taken.append(like)
        if len(taken) > 1:
            raise RuntimeError("no pinned memory")
        return real(like, False)

    plugin = PureBF16Precision(mode)
    with fake_device():
        monkeypatch.setattr(state_home, "_host_room", room)
        with pytest.raises(RuntimeError, match="pin_memory=False, which is slower"):
            fit(module, plugin, OptimizerOffload(bucket_bytes=1), **on_fake_device())
        monkeypatch.setattr(state_home, "_host_room", real)
        start = Start()
        fit(module, plugin, OptimizerOffload(pin_memory=False), start, **on_fake_device())
    assert_starts_from(start, wide, mode)


def test_a_plugin_is_copied_and_pickled_while_they_wait(module):
    plugin = PureBF16Precision()
    with pytest.raises(RuntimeError, match="before states are offloaded"):
        fit(module, plugin, Fails(), OptimizerOffload())
    waiting = plugin._optimizers.low_halves
    assert len(waiting) == 3
    for other in (copy.deepcopy(plugin), pickle.loads(pickle.dumps(plugin))):
        kept = other._optimizers.low_halves
        assert all(torch.equal(a, b) for a, b in zip(kept.values(), waiting.values(), strict=True))
