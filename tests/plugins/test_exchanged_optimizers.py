"""`PureBF16Precision` compensates every optimizer: exchanged, the module's own, around others; and kept gradients."""

import gc
import weakref
from importlib import import_module
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memkit.optim.compensation import compensation_of
from lightning_memkit.optim.consolidate import consolidate_checkpoint, float32_state_dict
from lightning_memkit.plugins.memory_budget.callback import MemoryBudget
from lightning_memkit.plugins.memory_report._facts import facts
from lightning_memkit.plugins.precision.pure_bf16 import PureBF16Precision
from tests.optim.wrappers import WRAPPERS
from tests.plugins.noise import NOISE

pytestmark = [
    *NOISE,
    pytest.mark.filterwarnings("ignore:.*`weights_only` was not set.*"),
    pytest.mark.filterwarnings("ignore:.*returned `None`, this fit will run with no optimizer"),
    pytest.mark.filterwarnings("ignore:.*resuming from a checkpoint that ended before the epoch.*"),
]
BF16, FP32 = torch.bfloat16, torch.float32


def adamw(module):
    return torch.optim.AdamW(module.parameters(), lr=1e-3)


class Fed(pl.LightningModule):
    """Its gradients are given numbers, which bfloat16 holds: float32 training takes the same steps."""

    def __init__(self, optimizer=adamw, manual: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.one = nn.Parameter(torch.randn(6, 4, generator=generator))
        self.two = nn.Parameter(torch.randn(5, generator=generator))
        self.make, self.automatic_optimization = optimizer, not manual

    def loss(self, number):
        generator = torch.Generator().manual_seed(100 + number)
        drawn = (torch.randn(p.shape, generator=generator).bfloat16() for p in self.parameters())
        products = (p * d.to(p.dtype) for p, d in zip(self.parameters(), drawn, strict=True))
        return torch.stack([product.float().sum() for product in products]).sum()

    def training_step(self, batch, batch_idx):
        return self.loss(batch_idx)

    def configure_optimizers(self):
        return self.make(self)

    def own_optimizers(self):
        return []

    def stepper(self) -> Any:
        return self.optimizers()

    def gradient(self) -> torch.Tensor:
        assert self.one.grad is not None
        return self.one.grad


class ByAttribute(Fed):
    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 2:
            self.trainer.optimizers = [torch.optim.SGD(self.parameters(), 1e-3)]


class ByStrategy(Fed):
    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx in (2, 4):
            self.trainer.strategy.setup_optimizers(self.trainer)


class BackAndForth(Fed):
    """Two optimizers over the same weights, in turn."""

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 0:
            self.pair = [self.trainer.optimizers[0], torch.optim.SGD(self.parameters(), 1e-3)]
        self.trainer.optimizers = [self.pair[batch_idx // 2 % 2]]


class OfSome(Fed):
    """The new optimizer steps some weights; another one steps the rest again later."""

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx in (2, 4):
            some = [self.one] if batch_idx == 2 else [self.one, self.two]
            self.trainer.optimizers = [torch.optim.SGD(some, 1e-3)]


class Joining(Fed):
    def configure_optimizers(self):
        return torch.optim.AdamW([self.two], 1e-3)

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 2:
            self.trainer.optimizers[0].add_param_group({"params": [self.one], "lr": 3e-3})


class Own(Fed):
    """`configure_optimizers` returns None; the module makes its optimizer itself."""

    def __init__(self) -> None:
        super().__init__(manual=True)

    def configure_optimizers(self):
        return None

    def on_fit_start(self):
        self.own = torch.optim.AdamW(self.parameters(), 1e-3)

    def own_optimizers(self):
        return [self.own]

    def training_step(self, batch, batch_idx):
        self.own.zero_grad()
        self.manual_backward(self.loss(batch_idx))
        self.own.step()


class OwnWithClosure(Own):
    def training_step(self, batch, batch_idx):
        def closure():
            self.own.zero_grad()
            loss = self.loss(batch_idx)
            self.manual_backward(loss)
            return loss

        self.own.step(closure=closure)


class OwnEveryTime(Own):
    """A new optimizer each batch; the old one is gone."""

    def training_step(self, batch, batch_idx):
        self.own = None
        self.own = torch.optim.SGD(self.parameters(), 1e-3)
        super().training_step(batch, batch_idx)


class Beside(Own):
    """One weight is stepped by the module's own optimizer, the other by the Trainer's."""

    def configure_optimizers(self):
        return torch.optim.SGD([self.one], 1e-3)

    def on_fit_start(self):
        self.own = torch.optim.SGD([self.two], 1e-3)

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        self.stepper().step()
        self.stepper().zero_grad()


class OverTheSame(Own):
    """Both step the same weights in each batch."""

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)

    def on_fit_start(self):
        self.own = torch.optim.SGD(self.parameters(), 1e-3)

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        self.stepper().step()


MODULES = (
    ByAttribute,
    ByStrategy,
    BackAndForth,
    OfSome,
    Joining,
    Own,
    OwnWithClosure,
    OwnEveryTime,
    Beside,
    OverTheSame,
)


def trainer(precision=None, batches: int = 6, **options) -> pl.Trainer:
    options = {"plugins": [precision] if precision else [], "max_epochs": 1} | options
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(
        accelerator="cpu", enable_checkpointing=False, limit_train_batches=batches, **quiet, **options
    )


def fitted(module, precision=None, rows: int = 8, **options):
    fit = {name: options.pop(name) for name in ("ckpt_path",) if name in options}
    runner = trainer(precision, **options)
    runner.fit(module, DataLoader(TensorDataset(torch.arange(rows)), 1), **fit)
    return module, runner


def exact() -> PureBF16Precision:
    return PureBF16Precision("split", states="exact")


def trained(module, runner) -> dict[str, torch.Tensor]:
    optimizers = [one for one in runner.optimizers if one.param_groups]
    return float32_state_dict(module, [*optimizers, *module.own_optimizers()])


def largest_difference(one, other) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("kind", MODULES)
def test_it_takes_the_steps_of_float32_training(kind):
    plain, _ = fitted(kind())
    ours, runner = fitted(kind(), exact())
    result = trained(ours, runner)
    assert all(weight.dtype == FP32 for weight in result.values())
    assert largest_difference(plain.state_dict(), result) == 0


@pytest.mark.parametrize("kind", MODULES)
def test_under_kahan_no_update_is_lost(kind):
    plain, _ = fitted(kind())
    ours, runner = fitted(kind(), PureBF16Precision("kahan"))
    assert largest_difference(plain.state_dict(), trained(ours, runner)) < 5e-4  # 4e-3 without compensation


@pytest.mark.parametrize("kind", [Beside, OwnEveryTime])  # SGD: its checkpoint lacks no states
@pytest.mark.parametrize("mode", ["split", "kahan"])
def test_what_the_modules_own_optimizers_stepped_resumes_bit_for_bit(kind, mode, tmp_path):
    def precision():
        return PureBF16Precision(mode, states="exact")

    whole, straight = fitted(kind(), precision(), max_epochs=2)
    ours, runner = fitted(kind(), precision())
    runner.save_checkpoint(tmp_path / "saved.ckpt")
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)
    expected, consolidated = trained(ours, runner), consolidate_checkpoint(saved)["state_dict"]
    assert largest_difference(expected, consolidated) == 0
    resumed, again = fitted(kind(), precision(), max_epochs=2, ckpt_path=tmp_path / "saved.ckpt")
    left, right = trained(whole, straight), trained(resumed, again)
    assert largest_difference(left, right) < (
        5e-5 if mode == "kahan" else 1e-9
    )  # a new optimizer draws other noise


def test_weights_that_are_stepped_no_more_keep_their_low_halves_in_checkpoints(tmp_path):
    plain, _ = fitted(OfSome(), batches=3)
    _, runner = fitted(OfSome(), exact(), batches=3)
    runner.save_checkpoint(tmp_path / "saved.ckpt")
    consolidated = consolidate_checkpoint(torch.load(tmp_path / "saved.ckpt", weights_only=True))
    assert largest_difference(plain.state_dict(), consolidated["state_dict"]) == 0


def test_an_exchanged_optimizer_is_freed():
    class Watching(ByAttribute):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 2:
                self.old = weakref.ref(self.trainer.optimizers[0])
            super().on_train_batch_start(batch, batch_idx)

        def on_train_end(self):
            gc.collect()
            assert self.old() is None

    fitted(Watching(), PureBF16Precision())


def test_after_the_fit_nothing_is_left_in_torch():
    hooks = import_module("torch.optim.optimizer")._global_optimizer_pre_hooks
    before = len(hooks)
    fitted(Own(), PureBF16Precision())
    assert len(hooks) == before
    assert not hasattr(torch.autograd.backward, "__wrapped__")
    parameter = nn.Parameter(torch.ones(2, dtype=BF16))
    stranger = torch.optim.SGD([parameter], 0.1)
    parameter.grad = torch.ones(2, dtype=BF16)
    stranger.step()
    assert compensation_of(stranger) is None


def test_a_first_step_that_fails_gives_bfloat16_weights_back():
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("no step")

    class Module(Own):
        def on_fit_start(self):
            self.own = Failing(self.parameters(), 1e-3)

    module = Module()
    with pytest.raises(RuntimeError, match="no step"):
        fitted(module, PureBF16Precision())
    assert {parameter.dtype for parameter in module.parameters()} == {BF16}


def test_optimizers_of_other_weights_are_left_alone():
    class Module(Own):
        def on_fit_start(self):
            super().on_fit_start()
            self.other = [nn.Parameter(torch.ones(2, dtype=BF16))]
            self.foreign = torch.optim.SGD(self.other, 0.1)

        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            self.other[0].grad = torch.ones(2, dtype=BF16)
            self.foreign.step()

    module, _ = fitted(Module(), PureBF16Precision())
    assert compensation_of(module.foreign) is None
    assert compensation_of(module.own) is not None


@pytest.mark.parametrize("kind", [Own, Beside])
def test_a_second_fit_goes_on_with_the_modules_own_optimizer(kind):
    class Kept(kind):
        def on_fit_start(self):
            if not hasattr(self, "own"):
                super().on_fit_start()

    plain, precision = Kept(), exact()
    ours = Kept()
    for _ in range(2):
        fitted(plain)
        _, runner = fitted(ours, precision)
    assert largest_difference(plain.state_dict(), trained(ours, runner)) == 0


def test_averages_follow_the_exchange():
    def average(precision):
        callback = WeightAveraging(avg_fn=lambda old, new, count: old + (new - old) / 4)
        fitted(ByAttribute(), precision, callbacks=[callback])
        assert callback._average_model is not None
        return dict(callback._average_model.module.named_parameters())

    ours, plain = average(exact()), average(None)
    for name, value in plain.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", [Fed, Joining])
def test_memory_budget_journals_what_is_compensated(kind):
    plain, _ = fitted(kind())
    ours, runner = fitted(kind(), exact(), callbacks=[MemoryBudget("1GiB", micro_batch_size=1)])
    assert largest_difference(plain.state_dict(), trained(ours, runner)) == 0


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(
    "base", [adamw, lambda module: torch.optim.SGD(module.parameters(), 1e-2, momentum=0.9)]
)
def test_optimizers_around_others_resume_bit_for_bit(wrapper, base, tmp_path):
    def make():
        return Fed(lambda module: wrapper(base(module)))

    whole, straight = fitted(make(), exact(), max_epochs=2)
    _, first = fitted(make(), exact())
    first.save_checkpoint(tmp_path / "saved.ckpt")
    resumed, runner = fitted(make(), exact(), max_epochs=2, ckpt_path=tmp_path / "saved.ckpt")
    assert runner.global_step == 12
    assert largest_difference(trained(whole, straight), trained(resumed, runner)) == 0


class Kept(Fed):
    """512 gradients of 0.001 in one step, kept by manual optimization."""

    def __init__(self, raw: bool = False) -> None:
        super().__init__(lambda module: torch.optim.SGD(module.parameters(), 1.0), manual=True)
        self.raw = raw

    def loss(self, number):
        one = torch.tensor(0.001, dtype=BF16)
        return torch.stack([(p * one.to(p.dtype)).float().sum() for p in self.parameters()]).sum()

    def backward_of(self, loss):
        if self.raw:
            loss.backward()
        else:
            self.manual_backward(loss)

    def training_step(self, batch, batch_idx):
        self.backward_of(self.loss(batch_idx))
        if batch_idx == 511:
            self.seen = self.gradient().clone()
            self.stepper().step()
            self.stepper().zero_grad()


class KeptInOneBatch(Kept):
    def training_step(self, batch, batch_idx):
        for number in range(512 if batch_idx == 0 else 0):
            super().training_step(batch, number)


class OwnZeroGrad(Kept):
    """Automatic optimization with hooks of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = True

    def training_step(self, batch, batch_idx):
        return self.loss(batch_idx)

    def optimizer_step(self, epoch, batch_idx, optimizer, closure: Any = None):
        closure()
        if batch_idx == 511:
            self.seen = self.gradient().clone()
            optimizer.step()

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if batch_idx == 0:
            optimizer.zero_grad()


class KeptForOwn(Kept):
    """The optimizer is the module's own: it is not known before its first step."""

    def configure_optimizers(self):
        return None

    def stepper(self):
        if not hasattr(self, "own"):
            self.own = torch.optim.SGD(self.parameters(), 1.0)
        return self.own


@pytest.mark.parametrize(
    "make", [Kept, lambda: Kept(raw=True), KeptInOneBatch, OwnZeroGrad, KeptForOwn],
    ids=["manual", "raw", "in one batch", "own zero_grad", "own optimizer"],
)  # fmt: skip
def test_kept_gradients_add_up_in_float32(make, caplog):
    plain, _ = fitted(make(), rows=512, batches=512)
    ours, _ = fitted(make(), exact(), rows=512, batches=512)
    assert ours.seen.dtype == FP32
    assert torch.equal(ours.seen, plain.seen)
    assert float(ours.seen.mean()) == pytest.approx(0.5117, abs=1e-4)


def test_a_report_names_gradients_in_float32_once_they_are():
    said = []

    class Look(pl.Callback):
        def on_train_batch_start(self, trainer, *_):
            said.append(facts(trainer, 0).precision)

        def on_train_batch_end(self, trainer, *_):
            said.append(facts(trainer, 0).precision)

    fitted(Kept(), PureBF16Precision(), rows=512, batches=512, callbacks=[Look()])
    assert said[0] == "bf16-true"
    assert said[-1] == "bf16-true, gradients in float32"
    assert len(set(said)) == 2


@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_usual_step_keeps_bfloat16_gradients(set_to_none):
    class Usual(Fed):
        def training_step(self, batch, batch_idx):
            self.manual_backward(self.loss(batch_idx))
            self.dtype_seen = self.gradient().dtype
            self.stepper().step()
            self.stepper().zero_grad(set_to_none=set_to_none)

    module, _ = fitted(Usual(manual=True), PureBF16Precision())
    assert module.dtype_seen == BF16
    assert module.one.grad_dtype == BF16


def test_asked_for_bfloat16_stays_bfloat16():
    ours, _ = fitted(Kept(), PureBF16Precision(grad_dtype="bfloat16"), rows=512, batches=512)
    assert ours.seen.dtype == BF16
    assert float(ours.seen.float().mean()) == pytest.approx(0.5, abs=1e-3)


def test_where_float32_is_impossible_it_is_said(monkeypatch):
    import lightning_memkit.plugins.precision.pure_bf16 as pure_bf16

    monkeypatch.setattr(pure_bf16, "why_no_float32_gradients", lambda *_, **__: "DDP reduces no others")
    with pytest.warns(UserWarning, match="several backward passes add up in bfloat16.*DDP reduces no others"):
        fitted(Kept(), PureBF16Precision(), rows=4, batches=4)
