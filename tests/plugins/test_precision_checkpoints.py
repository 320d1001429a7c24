"""Checkpoints of bfloat16 training through Lightning: resumed, consolidated, loaded into float32 and back."""

import importlib
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, Callback
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_memkit.optim.consolidate import float32_state_dict
from lightning_memkit.optim.consolidated_files import consolidate_file
from lightning_memkit.optim.schedule_free import switch_in_float32
from lightning_memkit.plugins.precision.pure_bf16 import PureBF16Precision
from tests.plugins.noise import NOISE

pytestmark = [
    *NOISE,
    pytest.mark.filterwarnings("ignore:.*`weights_only` was not set.*"),
    pytest.mark.filterwarnings("ignore:.*8-bit states"),
]
BF16, FP32 = torch.bfloat16, torch.float32
MODES = ("kahan", "split", "split24", "stochastic", "none")
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "torch.optim.AdamW": {"lr": 1e-2, "weight_decay": 0.1},
    "torch.optim.SGD": {"lr": 1e-2, "momentum": 0.9},
    "torch.optim.Adafactor": {"lr": 1e-2},
    "torch.optim.Muon": {"lr": 1e-2},
    "torch.optim.Adagrad": {"lr": 1e-2},
    "torch.optim.RMSprop": {"lr": 1e-3, "momentum": 0.9, "centered": True},
    "torch.optim.NAdam": {"lr": 1e-3},
    "bitsandbytes.optim.AdamW8bit": {"lr": 1e-3, "min_8bit_size": 64},
    "lion_pytorch.Lion": {"lr": 1e-3},
    "schedulefree.AdamWScheduleFree": {"lr": 1e-2, "warmup_steps": 3},
    "optimi.StableAdamW": {"lr": 1e-3, "triton": False, "foreach": False},
}


class Regression(pl.LightningModule):
    """Two groups, a scheduler, tied weights, an integer and a float64 input; ScheduleFree is switched."""

    def __init__(self, optimizer: str = "torch.optim.AdamW", options: dict | None = None) -> None:
        super().__init__()
        bias = not optimizer.endswith("Muon")
        self.first, self.second = nn.Linear(8, 16, bias=bias), nn.Linear(16, 16, bias=bias)
        self.third, self.last = nn.Linear(16, 16, bias=bias), nn.Linear(16, 1, bias=bias)
        self.third.weight = self.second.weight
        self.optimizer, self.options = optimizer, options or OPTIMIZERS[optimizer]

    def forward(self, features):
        return self.last(self.third(self.second(self.first(features).tanh()).tanh()).tanh())

    def training_step(self, batch, batch_idx):
        return functional.mse_loss(self(batch[0]).float(), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("loss", functional.mse_loss(self(batch[0]).float(), batch[1]))

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def _switch(self, how: str) -> None:
        switch = getattr(self.optimizers(), how, None)
        if switch is not None:
            switch()

    def on_train_epoch_start(self) -> None:
        self._switch("train")

    def on_train_epoch_end(self) -> None:
        self._switch("eval")

    def configure_optimizers(self):
        package, _, name = self.optimizer.rpartition(".")
        build = getattr(importlib.import_module(package), name)
        parameters = list(self.parameters())
        optimizer = build(
            [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 1e-3}], **self.options
        )
        switch_in_float32(optimizer)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def loader() -> DataLoader:
    features = torch.randn(32, 8, generator=torch.Generator().manual_seed(5))
    return DataLoader(TensorDataset(features, features.sum(1, keepdim=True)), batch_size=8)


def trainer(
    tmp_path, precision: PureBF16Precision | None = None, epochs: int = 1, callbacks=()
) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        plugins=[] if precision is None else [precision],
        precision="32-true" if precision is None else None,
        callbacks=list(callbacks),
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )


def saved(tmp_path, module: pl.LightningModule, precision: PureBF16Precision | None, **options) -> pl.Trainer:
    """Trains an epoch and saves `saved.ckpt`."""
    runner = trainer(tmp_path, precision, **options)
    runner.fit(module, loader())
    runner.save_checkpoint(tmp_path / "saved.ckpt")
    return runner


def everything(module: pl.LightningModule, runner: pl.Trainer) -> dict[str, torch.Tensor]:
    """Weights, buffers and every tensor of every optimizer state."""
    found = {name: value.clone() for name, value in module.state_dict().items()}
    for number, optimizer in enumerate(runner.optimizers):
        states = optimizer.state_dict()["state"]
        for index, state in states.items():
            found |= flattened(state, f"{number}.{index}")
    return found


def flattened(value: Any, path: str) -> dict[str, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return {path: value.clone()}
    if isinstance(value, dict):
        return {
            key: tensor
            for name, item in value.items()
            for key, tensor in flattened(item, f"{path}.{name}").items()
        }
    return {}


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert value.dtype == right[name].dtype, name
        assert torch.equal(value, right[name]), name


FAST = [
    *((name, MODES[i % 4], ("compact", "exact")[i % 3 == 0]) for i, name in enumerate(OPTIMIZERS)),
    *((name, "split24", "8-bit") for name in OPTIMIZERS),
]
REST = [
    pytest.param(name, mode, states, marks=pytest.mark.slow)
    for name in OPTIMIZERS
    for mode in MODES
    for states in ("compact", "exact", "8-bit")
    if (name, mode, states) not in FAST
]


@pytest.mark.parametrize(("name", "mode", "states"), [*FAST, *REST])
@pytest.mark.usefixtures("short_rows")
def test_resume_is_bitwise(name, mode, states, tmp_path):
    pytest.importorskip(name.partition(".")[0])
    torch.manual_seed(1)
    whole, first = Regression(name), Regression(name)
    first.load_state_dict(whole.state_dict())
    straight = trainer(tmp_path, PureBF16Precision(mode, states), epochs=3)
    straight.fit(whole, loader())
    saved(tmp_path, first, PureBF16Precision(mode, states))
    resumed = Regression(name)  # other weights, in float32
    runner = trainer(tmp_path, PureBF16Precision(mode, states), epochs=3)
    runner.fit(resumed, loader(), ckpt_path=tmp_path / "saved.ckpt", weights_only=True)
    assert runner.global_step == 12
    left, right = everything(whole, straight), everything(resumed, runner)
    assert len(left) > len(whole.state_dict())
    assert_same(left, right)


class AtStart(Callback):
    """What a run starts from."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.everything: dict[str, torch.Tensor] = {}

    def on_train_start(self, trainer, pl_module) -> None:
        self.weights = float32_state_dict(pl_module, trainer.optimizers)
        self.everything = everything(pl_module, trainer)


def float32_of(module: pl.LightningModule, runner: pl.Trainer) -> dict[str, torch.Tensor]:
    return float32_state_dict(module, runner.optimizers)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("mode", ["split", "kahan"])
def test_consolidated_it_resumes_in_plain_float32_training(mode, name, tmp_path):
    pytest.importorskip(name.partition(".")[0])
    module = Regression(name)
    runner = saved(tmp_path, module, PureBF16Precision(mode))
    consolidate_file(tmp_path / "saved.ckpt", tmp_path / "fp32.ckpt")
    look, plain = AtStart(), Regression(name)
    again = trainer(tmp_path, epochs=2, callbacks=[look])
    again.fit(plain, loader(), ckpt_path=tmp_path / "fp32.ckpt", weights_only=True)
    assert again.global_step == 8
    assert_same(look.weights, float32_of(module, runner))
    kept = {BF16, torch.int16, torch.float16} & {value.dtype for value in look.everything.values()}
    assert not kept
    assert not any("low_half" in key or "compensation" in key for key in look.everything)
    for optimizer in again.optimizers:
        assert "memkit" not in optimizer.state_dict()
    assert all(value.isfinite().all() for value in plain.state_dict().values())


@pytest.mark.parametrize("name", ["torch.optim.AdamW", "torch.optim.SGD", "torch.optim.Muon"])
@pytest.mark.parametrize("mode", ["split", "kahan"])
def test_there_and_back_is_bitwise(mode, name, tmp_path):
    """bfloat16 file → float32 file → resumed in bfloat16, against the bfloat16 file resumed at once."""
    saved(tmp_path, Regression(name), PureBF16Precision(mode, "exact"))
    consolidate_file(tmp_path / "saved.ckpt", tmp_path / "fp32.ckpt")
    starts, ends = [], []
    for path in ("saved.ckpt", "fp32.ckpt"):
        module, look = Regression(name), AtStart()
        runner = trainer(tmp_path, PureBF16Precision(mode, "exact"), epochs=3, callbacks=[look])
        runner.fit(module, loader(), ckpt_path=tmp_path / path, weights_only=True)
        starts.append(look.weights)
        ends.append(everything(module, runner))
    assert_same(*starts)
    if mode == "split":  # a float32 file does not hold where Kahan's rounding noise stands
        assert_same(*ends)


def test_a_float32_run_goes_on_in_bfloat16_from_its_exact_weights(tmp_path):
    module = Regression()
    saved(tmp_path, module, None)
    look, half = AtStart(), Regression()
    runner = trainer(tmp_path, PureBF16Precision("split", "exact"), epochs=2, callbacks=[look])
    runner.fit(half, loader(), ckpt_path=tmp_path / "saved.ckpt", weights_only=True)
    assert half.first.weight.dtype == BF16
    assert_same(look.weights, dict(module.state_dict()))
    saved_moment = torch.load(tmp_path / "saved.ckpt")["optimizer_states"][0]["state"][0]["exp_avg"]
    assert torch.equal(look.everything["0.0.exp_avg"], saved_moment)


def test_load_from_checkpoint_into_float32(tmp_path):
    module = Regression()
    runner = saved(tmp_path, module, PureBF16Precision("split"))
    consolidate_file(tmp_path / "saved.ckpt", tmp_path / "fp32.ckpt")
    rounded = Regression.load_from_checkpoint(tmp_path / "saved.ckpt", weights_only=True)
    exact = Regression.load_from_checkpoint(tmp_path / "fp32.ckpt", weights_only=True)
    for name, weight in float32_of(module, runner).items():
        assert exact.state_dict()[name].dtype == rounded.state_dict()[name].dtype == FP32
        assert torch.equal(exact.state_dict()[name], weight)
        assert torch.equal(rounded.state_dict()[name], module.state_dict()[name].float())


@pytest.mark.parametrize("file", ["bf16", "fp32", "consolidated"])
@pytest.mark.parametrize("under", [None, "split"])
def test_validate_test_and_predict_take_every_file(under, file, tmp_path):
    module = Regression()
    trained = saved(tmp_path, module, None if file == "fp32" else PureBF16Precision("split"))
    path = tmp_path / "saved.ckpt"
    if file == "consolidated":
        path = consolidate_file(path, tmp_path / "fp32.ckpt")
    weights = float32_of(module, trained) if file == "consolidated" else module.state_dict()
    expected = Regression()
    expected.load_state_dict(weights)
    if under:
        expected = expected.to(BF16)
    (features, targets), *_ = loader()
    outputs = expected(features.to(BF16) if under else features).detach()
    for how in ("validate", "test", "predict"):
        fresh = Regression()
        runner = trainer(tmp_path, PureBF16Precision(under) if under else None)
        options = {} if how == "predict" else {"verbose": False}
        result = getattr(runner, how)(fresh, loader(), ckpt_path=path, weights_only=True, **options)
        assert {parameter.dtype for parameter in fresh.parameters()} == {BF16 if under else FP32}
        if how == "predict":
            assert torch.equal(result[0], outputs)
        else:
            assert result[0]["loss"] < 100
    assert targets.dtype == FP32


class Generative(pl.LightningModule):
    """Two optimizers by hand, tied weights, a frozen layer, a table and a buffer that accumulates."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = nn.Linear(8, 8), nn.Linear(8, 1)
        self.norm, self.mirror = nn.LayerNorm(8), nn.Linear(8, 8, bias=False)
        self.mirror.weight = self.generator.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.register_buffer("running", torch.zeros(8))
        self.register_buffer("inv_freq", torch.rand(4))

    def training_step(self, batch, batch_idx):
        features, target = batch
        first, second = self.optimizers()  # pyright: ignore[reportGeneralTypeIssues]
        self.get_buffer("running").add_(1 / 3)
        for optimizer, parameters in ((first, self.generator), (second, self.critic)):
            hidden = self.norm(self.mirror(self.generator(self.frozen(features))))
            loss = functional.mse_loss(self.critic(hidden).float(), target)
            optimizer.zero_grad()
            self.manual_backward(loss, inputs=[*parameters.parameters(), *self.norm.parameters()])
            optimizer.step()

    def configure_optimizers(self):
        # Adagrad has states from the start; the frozen layer is in an optimizer and never stepped.
        return (
            torch.optim.Adagrad([*self.generator.parameters(), *self.frozen.parameters()], lr=1e-3),
            torch.optim.AdamW([*self.norm.parameters(), *self.critic.parameters()], lr=1e-4),
        )


def test_several_optimizers_ties_frozen_layers_exceptions_and_buffers(tmp_path):
    module, start = Generative(), Generative()
    start.load_state_dict(module.state_dict())
    precision = PureBF16Precision("split", fp32_exceptions=["LayerNorm", "running"])
    runner = saved(tmp_path, module, precision)
    consolidate_file(tmp_path / "saved.ckpt", tmp_path / "fp32.ckpt")
    weights = torch.load(tmp_path / "fp32.ckpt", weights_only=True)["state_dict"]
    assert weights.keys() == module.state_dict().keys()
    assert {value.dtype for value in weights.values()} == {FP32}
    trained = {
        parameter: weight
        for handle in precision.compensations
        for parameter, weight in handle.float32_weights()
    }
    for name, parameter in module.named_parameters(remove_duplicate=False):
        assert torch.equal(weights[name], trained[parameter]), name
    assert torch.equal(weights["frozen.weight"], start.frozen.weight)  # its float32 bits, untouched
    assert not torch.equal(weights["generator.weight"], weights["generator.weight"].to(BF16).float())
    assert torch.equal(weights["mirror.weight"], weights["generator.weight"])
    assert torch.equal(weights["norm.weight"], module.norm.weight)
    assert weights["running"][0].item() == pytest.approx(4 / 3, rel=1e-6)
    assert torch.equal(weights["inv_freq"], start.get_buffer("inv_freq"))
    plain = Generative()
    again = trainer(tmp_path, epochs=2)
    again.fit(plain, loader(), ckpt_path=tmp_path / "fp32.ckpt", weights_only=True)
    assert_same({"frozen": plain.frozen.weight}, {"frozen": start.frozen.weight})
    assert runner.global_step == 8


class Finetuned(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        return functional.mse_loss(self.head(self.backbone(batch[0])).float(), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)


@pytest.mark.filterwarnings("ignore:The provided params to be frozen")
def test_a_group_that_a_callback_adds_later_is_saved_consolidated_and_resumed(tmp_path):
    def unfreezing() -> BackboneFinetuning:
        return BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False)

    module = Finetuned()
    runner = saved(tmp_path, module, PureBF16Precision("split"), epochs=2, callbacks=[unfreezing()])
    before = everything(module, runner)
    assert len(runner.optimizers[0].param_groups) == 2
    consolidate_file(tmp_path / "saved.ckpt", tmp_path / "fp32.ckpt")
    weights = torch.load(tmp_path / "fp32.ckpt", weights_only=True)["state_dict"]
    assert_same(weights, float32_of(module, runner))
    assert not torch.equal(weights["backbone.0.weight"], weights["backbone.0.weight"].to(BF16).float())
    for path, precision in (("saved.ckpt", PureBF16Precision("split")), ("fp32.ckpt", None)):
        look = AtStart()
        resumed = trainer(tmp_path, precision, epochs=3, callbacks=[unfreezing(), look])
        resumed.fit(Finetuned(), loader(), ckpt_path=tmp_path / path, weights_only=True)
        assert_same(look.weights, weights)
        if precision is not None:
            assert_same(look.everything, before)


def test_names_are_saved_with_the_plugin_and_with_primitives_only(tmp_path):
    saved(tmp_path, Regression(), PureBF16Precision())
    state = torch.load(tmp_path / "saved.ckpt", weights_only=True)["PureBF16Precision"]
    names = state["memkit_parameter_names"]
    assert names[0][:3] == [["first.weight"], ["first.bias"], ["second.weight", "third.weight"]]


def test_the_live_form_is_the_files(tmp_path):
    module = Regression()
    runner = saved(tmp_path, module, PureBF16Precision())
    consolidate_file(tmp_path / "saved.ckpt", tmp_path / "fp32.ckpt")
    assert_same(
        float32_of(module, runner), torch.load(tmp_path / "fp32.ckpt", weights_only=True)["state_dict"]
    )


def test_a_module_can_export_itself_through_its_own_optimizers(tmp_path):
    exported: list[dict[str, torch.Tensor]] = []

    class Exporting(Regression):
        def on_train_epoch_end(self) -> None:
            # Lightning's wrappers, which forward to the optimizers.
            exported.append(float32_state_dict(self, self.optimizers(), device="cpu"))  # pyright: ignore

    module = Exporting()
    runner = saved(tmp_path, module, PureBF16Precision("split"))
    assert_same(exported[0], float32_of(module, runner))
    assert not torch.equal(exported[0]["first.weight"], exported[0]["first.weight"].to(BF16).float())
