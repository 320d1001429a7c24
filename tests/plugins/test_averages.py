"""Lightning's averaging callbacks beside the precision plugin, and the names of theirs that are taken over."""

import inspect

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_memkit.optim.consolidate import consolidate_checkpoint, float32_state_dict
from lightning_memkit.plugins.precision.pure_bf16 import PureBF16Precision
from tests.plugins.noise import NOISE

pytestmark = [
    *NOISE,
    pytest.mark.filterwarnings("ignore:.*`weights_only` was not set.*"),
    pytest.mark.filterwarnings("ignore:SWA is currently only supported every epoch"),
]
BF16, FP32 = torch.bfloat16, torch.float32
MODES = ("kahan", "split", "split24", "stochastic", "none")
EPOCH = 8


class Regression(pl.LightningModule):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        middle = nn.BatchNorm1d(16) if norm else nn.Tanh()
        self.net = nn.Sequential(nn.Linear(8, 16), middle, nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        return functional.mse_loss(self.net(batch[0]).float(), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("loss", functional.mse_loss(self.net(batch[0]).float(), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def loader() -> DataLoader:
    features = torch.randn(8 * EPOCH, 8, generator=torch.Generator().manual_seed(5))
    return DataLoader(TensorDataset(features, features.sum(1, keepdim=True)), batch_size=8)


def fit(module, callbacks, tmp_path, precision=None, epochs=4, validate=True, ckpt_path=None) -> pl.Trainer:
    trainer = pl.Trainer(
        accelerator="cpu",
        plugins=[] if precision is None else [precision],
        callbacks=callbacks,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, loader(), loader() if validate else None, ckpt_path=ckpt_path, weights_only=True)
    return trainer


def built(born=FP32, norm: bool = False) -> Regression:
    torch.manual_seed(1)
    return Regression(norm).to(born)


def ema() -> EMAWeightAveraging:
    return EMAWeightAveraging(decay=0.999)


def swa() -> StochasticWeightAveraging:
    return StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1, annealing_epochs=1)


CALLBACKS = {"ema": ema, "average": WeightAveraging, "swa": swa}


class Weights(Callback):
    """Copies of the float32 weights, step by step."""

    def __init__(self) -> None:
        self.seen: list[list[torch.Tensor]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        weights = float32_state_dict(pl_module, trainer.optimizers)
        self.seen.append([weights[name] for name, _ in pl_module.named_parameters()])


def average_of(callback) -> list[torch.Tensor]:
    average = callback._average_model
    average = average.module if isinstance(callback, WeightAveraging) else average
    return [parameter.detach().clone() for parameter in average.parameters()]


def test_lightning_s_names_that_are_taken_over():
    for name in ("_swap_models", "_copy_average_to_current"):
        assert list(inspect.signature(getattr(WeightAveraging, name)).parameters) == ["self", "pl_module"]
    stock = StochasticWeightAveraging
    assert len(inspect.signature(stock.update_parameters).parameters) == 4
    assert len(inspect.signature(stock.transfer_weights).parameters) == 2
    source = inspect.getsource(WeightAveraging)
    assert "self._average_model.update_parameters(pl_module)" in source
    assert '"averaging_state"' in source
    assert '"average_model_state"' in inspect.getsource(stock.state_dict)


@pytest.mark.parametrize("born", [FP32, BF16])
@pytest.mark.parametrize("mode", MODES)
def test_an_ema_averages_the_float32_weights(mode, born, tmp_path):
    """The oracle: the recursion in float64 over the weights of each step; every validation swaps in between."""
    callback, weights = ema(), Weights()
    fit(built(born), [weights, callback], tmp_path, PureBF16Precision(mode))
    expected = [weight.double() for weight in weights.seen[0]]
    for later in weights.seen[1:]:
        expected = [0.999 * old + 0.001 * new.double() for old, new in zip(expected, later, strict=True)]
    for average, truth in zip(average_of(callback), expected, strict=True):
        assert average.dtype == FP32
        assert ((average - truth).abs() <= 1e-5 * truth.abs() + 1e-7).all()


@pytest.mark.parametrize("born", [FP32, BF16])
def test_swa_averages_the_float32_weights_of_the_epochs(born, tmp_path):
    callback, weights = swa(), Weights()
    module, precision = built(born), PureBF16Precision("split")
    start = [parameter.detach().float() for parameter in module.parameters()]
    trainer = fit(module, [weights, callback], tmp_path, precision)
    epochs = [start, *(weights.seen[EPOCH * epoch - 1] for epoch in (1, 2, 3))]
    for index, average in enumerate(average_of(callback)):
        truth = torch.stack([epoch[index].double() for epoch in epochs]).mean(0)
        assert ((average - truth).abs() <= 1e-6 * truth.abs() + 1e-7).all()
    after = float32_state_dict(module, trainer.optimizers)
    for (name, _), average in zip(module.named_parameters(), average_of(callback), strict=True):
        assert torch.equal(after[name], average)


@pytest.mark.parametrize("mode", MODES)
def test_validation_on_the_average_does_not_touch_the_training(mode, tmp_path):
    runs = []
    for validate in (True, False):
        weights = Weights()
        fit(built(), [weights, ema()], tmp_path, PureBF16Precision(mode), validate=validate)
        runs.append(weights.seen)
    for with_, without in zip(*runs, strict=True):
        for left, right in zip(with_, without, strict=True):
            assert torch.equal(left, right)


class AtValidation(Callback):
    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0) -> None:
        if not trainer.sanity_checking:
            self.weights = float32_state_dict(pl_module, trainer.optimizers)


@pytest.mark.parametrize("mode", MODES)
def test_validation_runs_on_the_average(mode, tmp_path):
    look, callback = AtValidation(), ema()
    module = built()
    fit(module, [look, callback], tmp_path, PureBF16Precision(mode))
    for (name, _), average in zip(module.named_parameters(), average_of(callback), strict=True):
        assert torch.equal(look.weights[name], average.to(BF16).float())


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("kind", CALLBACKS)
def test_the_average_at_the_end_is_exact_and_so_are_its_checkpoints(kind, norm, tmp_path):
    module, callback, precision = built(norm=norm), CALLBACKS[kind](), PureBF16Precision("split")
    trainer = fit(module, [callback], tmp_path, precision)
    weights = float32_state_dict(module, trainer.optimizers)
    for (name, _), average in zip(module.named_parameters(), average_of(callback), strict=True):
        assert torch.equal(weights[name], average)
        assert average.isfinite().all()
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    plain = consolidate_checkpoint(torch.load(tmp_path / "end.ckpt", weights_only=True))
    for key in {"state_dict", "current_model_state"} & plain.keys():
        for name, _ in module.named_parameters():
            assert torch.equal(plain[key][name], weights[name]), key
    fresh = built(norm=norm)
    fresh.load_state_dict(plain["state_dict"])
    assert torch.equal(fresh.get_parameter("net.0.weight"), weights["net.0.weight"])


@pytest.mark.parametrize("born", [FP32, BF16])
@pytest.mark.parametrize("mode", ["kahan", "split", "split24"])
@pytest.mark.parametrize("kind", CALLBACKS)
def test_resume_with_the_callback_is_bitwise(kind, mode, born, tmp_path):
    class Save(Callback):
        def on_train_epoch_end(self, trainer, pl_module) -> None:
            if trainer.current_epoch == 1:
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    whole, callback = built(born), CALLBACKS[kind]()
    trainer = fit(whole, [callback, Save()], tmp_path, PureBF16Precision(mode))
    torch.manual_seed(9)
    resumed, again = Regression().to(born), CALLBACKS[kind]()
    other = fit(resumed, [again], tmp_path, PureBF16Precision(mode), ckpt_path=tmp_path / "half.ckpt")
    assert other.current_epoch == 4
    for left, right in zip(average_of(callback), average_of(again), strict=True):
        assert torch.equal(left, right)
    left, right = (
        float32_state_dict(net, runner.optimizers) for net, runner in ((whole, trainer), (resumed, other))
    )
    for name, value in left.items():
        assert torch.equal(right[name], value), name


def test_validating_after_the_fit_keeps_the_average_exact(tmp_path):
    module, callback = built(), ema()
    trainer = fit(module, [callback], tmp_path, PureBF16Precision("split"))
    before, weights = average_of(callback), float32_state_dict(module, trainer.optimizers)
    trainer.validate(module, loader(), verbose=False)
    for left, right in zip(before, average_of(callback), strict=True):
        assert torch.equal(left, right)
        assert not torch.equal(right, right.to(BF16).float())
    for name, value in float32_state_dict(module, trainer.optimizers).items():
        assert torch.equal(value, weights[name])


def test_callbacks_get_their_methods_back(tmp_path):
    for make in CALLBACKS.values():
        callback = make()
        fit(built(), [callback], tmp_path, PureBF16Precision(), epochs=2)
        assert not {"_swap_models", "_copy_average_to_current", "update_parameters", "transfer_weights"} & {
            *vars(callback),
            *vars(callback._average_model),
        }


def test_a_callback_of_the_users_own_making_is_left_alone(tmp_path):
    calls = []

    class Own(EMAWeightAveraging):
        def _swap_models(self, pl_module):
            calls.append(pl_module)
            return super()._swap_models(pl_module)

    fit(built(), [Own(decay=0.9)], tmp_path, PureBF16Precision(), epochs=2)
    assert calls
