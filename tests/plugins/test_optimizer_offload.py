# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false
"""Optimizer states in host memory inside Lightning's Trainer, on an accelerator without hardware."""

import gc

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_memkit.optim import pieces
from lightning_memkit.optim.state_home import tensors_of
from lightning_memkit.plugins.callbacks.gradient_release import GradientRelease
from lightning_memkit.plugins.callbacks.optimizer_offload import OptimizerOffload
from lightning_memkit.plugins.precision.pure_bf16 import PureBF16Precision
from lightning_memkit.utilities.errors import NoEffectWarning
from tests.plugins.fake_accelerator import on_fake_device
from tests.plugins.noise import NOISE
from tests.testing.fake_device import fake_device
from tests.testing.needs import NEEDS_COMPILER

pytestmark = [*NOISE, NEEDS_COMPILER]

WIDTH, DEPTH = 64, 16
BUCKET = 40_000  # states of one layer in float32


class Deep(LightningModule):
    """Two groups, a scheduler, and more optimizer states than activations."""

    def __init__(self, optimizer=torch.optim.AdamW, manual: bool = False, fail_at: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
        self.optimizer_class, self.automatic_optimization, self.fail_at = optimizer, not manual, fail_at

    def training_step(self, batch, batch_idx):
        if batch_idx == self.fail_at:
            raise RuntimeError("a step that fails")
        loss = F.mse_loss(self.layers(batch[0]).float(), batch[0].roll(1, 1))
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.5)
            optimizer.step()
            self.lr_schedulers().step()
        return loss

    def configure_optimizers(self):
        groups = [
            {"params": self.layers[:2].parameters(), "lr": 1e-3},
            {"params": self.layers[2:].parameters()},
        ]
        optimizer = self.optimizer_class(groups, lr=1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Watch(Callback):
    """What loading and training added to the device's bytes at the start of the fit, and where states live."""

    def __init__(self, device):
        self.device = device

    def on_fit_start(self, trainer, module):
        gc.collect()  # a run before left cycles; collected within this one, they would lower its bytes
        self.device.reset_peak()
        self.at_start = self.device.live_bytes

    def on_train_start(self, trainer, module):
        self.loading_bytes = self.device.peak_bytes - self.at_start
        self.device.reset_peak()

    def on_train_batch_end(self, trainer, module, *_):
        self.added_bytes = self.device.peak_bytes - self.at_start
        self.places = {
            tensor.device.type
            for optimizer in trainer.optimizers
            for state in optimizer.state.values()
            for tensor in tensors_of(state)
        }


def loader():
    """The same batch again and again: Lightning replays batches when it resumes within an epoch."""
    rows = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)).repeat(3, 1)
    return DataLoader(TensorDataset(rows), batch_size=4)


def fit(module, tmp_path, *callbacks, steps=6, ckpt_path=None, **options):
    automatic = {"gradient_clip_val": 0.5} if module.automatic_optimization else {}
    trainer = Trainer(
        **{**on_fake_device(), **automatic, **options},
        max_steps=steps,
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, loader(), ckpt_path=ckpt_path)
    return trainer


def run(device, tmp_path, *callbacks, module=None, **options):
    """Weights after training, and what the watch saw."""
    watch, module = Watch(device), module or Deep()
    fit(module, tmp_path, *callbacks, watch, **{"enable_checkpointing": False, **options})
    return [parameter.detach().cpu() for parameter in module.parameters()], watch


def assert_equal(first, second):
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


PRECISIONS = {
    "float32": dict,
    "kahan": lambda: {"plugins": [PureBF16Precision()]},
    "split exact": lambda: {"plugins": [PureBF16Precision("split", "exact")]},
}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_weights_are_bitwise_the_same_and_the_peak_is_lower(precision, tmp_path):
    options = PRECISIONS[precision]
    with fake_device() as device:
        expected, without = run(device, tmp_path, **options())
        weights, watch = run(device, tmp_path, OptimizerOffload(BUCKET), **options())
    assert_equal(weights, expected)
    assert without.places == {"fake"}
    assert watch.places == {"cpu"}
    states = {"float32": 8, "kahan": 6, "split exact": 10}[precision] * DEPTH * WIDTH * WIDTH
    # What is saved: all states, but for three buckets of them (in bfloat16 a bucket holds more layers).
    assert without.added_bytes - watch.added_bytes >= states - 3 * BUCKET


@pytest.mark.sampled(3)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.NAdam])
def test_a_run_resumes_bitwise_without_a_peak(precision, optimizer, tmp_path):
    options = PRECISIONS[precision]()
    with fake_device() as device:
        expected, _ = run(device, tmp_path, module=Deep(optimizer), **options)
        checkpoints = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1)
        options = {**options, "enable_checkpointing": True}
        run(device, tmp_path, checkpoints, OptimizerOffload(BUCKET), module=Deep(optimizer), **options)
        for callback in ([OptimizerOffload(BUCKET)], []):  # with it and without it, from the same file
            weights, watch = run(
                device,
                tmp_path,
                *callback,
                checkpoints,
                module=Deep(optimizer),
                ckpt_path=tmp_path / "step=3.ckpt",
                **options,
            )
            assert_equal(weights, expected)
            assert (watch.loading_bytes <= 1024) == bool(callback)
            assert watch.places == ({"cpu"} if callback else {"fake"})


def test_manual_optimization(tmp_path):
    with fake_device() as device:
        expected, _ = run(device, tmp_path, module=Deep(manual=True))
        weights, watch = run(device, tmp_path, OptimizerOffload(BUCKET), module=Deep(manual=True))
    assert_equal(weights, expected)
    assert watch.places == {"cpu"}


def test_accumulation(tmp_path):
    with fake_device() as device:
        expected, _ = run(device, tmp_path, accumulate_grad_batches=2)
        weights, _ = run(device, tmp_path, OptimizerOffload(BUCKET), accumulate_grad_batches=2)
    assert_equal(weights, expected)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("release_first", [False, True])
def test_with_gradient_release_the_device_holds_the_weights_and_little_else(
    precision, release_first, tmp_path
):
    options = {**PRECISIONS[precision](), "gradient_clip_val": None}
    with fake_device() as device:
        expected, _ = run(device, tmp_path, **options)
        callbacks = [OptimizerOffload(BUCKET), GradientRelease(bundle_bytes=0)]
        weights, watch = run(device, tmp_path, *(callbacks[::-1] if release_first else callbacks), **options)
    assert_equal(weights, expected)
    assert watch.places == {"cpu"}
    assert watch.added_bytes <= 6 * BUCKET  # a layer's gradient, float32 shadows, and states; activations


@pytest.mark.parametrize("fail_at", [None, 2])
def test_the_end_gives_everything_back(fail_at, tmp_path):
    with fake_device():
        module, callback = Deep(fail_at=fail_at), OptimizerOffload(BUCKET)
        trainers = []

        class Keep(Callback):
            def on_fit_start(self, trainer, pl_module):
                trainers.append(trainer)

        if fail_at is None:
            fit(module, tmp_path, callback, Keep(), enable_checkpointing=False)
        else:
            with pytest.raises(RuntimeError, match="a step that fails"):
                fit(module, tmp_path, callback, Keep(), enable_checkpointing=False)
        (trainer,) = trainers
        assert "load_optimizer_state_dict" not in vars(trainer.strategy)
        # The scheduler was made before, so its wrapper of the stock step is what was there.
        assert hasattr(trainer.optimizers[0].step, "_wrapped_by_lr_sched")
        assert "load_state_dict" not in vars(trainer.optimizers[0])
        fit(Deep(), tmp_path, callback, enable_checkpointing=False)  # one callback serves two fits


def test_on_the_cpu_it_says_that_nothing_is_freed(tmp_path):
    with pytest.warns(NoEffectWarning, match="are on cpu, which computes in host memory"):
        fit(
            Deep(),
            tmp_path,
            OptimizerOffload(),
            accelerator="cpu",
            strategy="auto",
            enable_checkpointing=False,
        )


def test_a_strategy_that_holds_the_states_itself_is_refused(tmp_path):
    trainer = Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path)
    trainer.strategy.__class__ = FSDPStrategy
    with pytest.raises(
        ValueError, match=r"FSDPStrategy, which holds .*; use FSDPStrategy\(cpu_offload=True\)"
    ):
        OptimizerOffload().setup(trainer, Deep(), "fit")


def test_a_size_that_can_not_be_read_is_refused_at_construction():
    with pytest.raises(ValueError, match="'much' is not a size"):
        OptimizerOffload(bucket_bytes="much")


def test_repr_round_trips():
    callback = OptimizerOffload(bucket_bytes="1GiB", pin_memory=False)
    assert vars(eval(repr(callback))).items() >= {"bucket_bytes": "1GiB", "pin_memory": False}.items()


class Early(Callback):
    """The most bytes on the device until the callbacks before it have started the fit."""

    def __init__(self, device):
        self.device = device

    def on_fit_start(self, trainer, module):
        self.peak_bytes = self.device.peak_bytes - self.before

    def setup(self, trainer, module, stage):
        gc.collect()
        self.device.reset_peak()
        self.before = self.device.live_bytes


@pytest.mark.parametrize("mode", ["kahan", "split", "split24"])
def test_captured_low_halves_never_are_all_on_the_device(mode, tmp_path, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_ELEMENTS_ACCELERATOR", 1024)
    # Parameters stay the same objects on their way to the device, as on the way to CUDA.
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    weights = DEPTH * (WIDTH + 1) * WIDTH * 2
    with fake_device() as device:
        expected, _ = run(device, tmp_path, plugins=[PureBF16Precision(mode)])
        early = Early(device)
        trained, _ = run(device, tmp_path, OptimizerOffload(BUCKET), early, plugins=[PureBF16Precision(mode)])
        # Some buckets, each of the layers whose states it will hold, and a slice's temporaries.
        assert weights < early.peak_bytes <= weights + 32 * 1024
        without = Early(device)
        run(device, tmp_path, without, plugins=[PureBF16Precision(mode)])
        assert without.peak_bytes >= weights * (1.5 if mode == "split24" else 2)
    assert_equal(trained, expected)
