"""User code around backward and the step while gradients are released: exact, or refused by name, never silent."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from lightning_memkit import MemoryBudget, PureBF16Precision
from lightning_memkit.optim.gradient_release import release_of
from lightning_memkit.plugins.callbacks.gradient_release import GradientRelease
from tests.plugins.toys import trainer, weights


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        self.seen: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), 0.01)


def fitted(
    kind: Callable[[], Net], *callbacks: Callback, max_steps: int = 4, **options: Any
) -> tuple[Net, Trainer]:
    torch.manual_seed(0)
    module = kind()
    rows: Any = torch.randn(32, 5)
    run = trainer(*callbacks, max_steps=max_steps, **options)
    run.fit(module, DataLoader(rows, 4))
    return module, run


def assert_same(kind: Callable[[], Net], *, bundle_bytes: int = 0, **options: Any) -> None:
    plain = weights(fitted(kind, **options)[0])
    assert torch.equal(plain, weights(fitted(kind, GradientRelease(bundle_bytes=bundle_bytes), **options)[0]))


# Optimizer steps that use gradients which are gone


def clip(module: Net) -> None:
    clip_grad_norm_(module.parameters(), 0.01)


def scale(module: Net) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.1)


def noise_through_data(module: Net) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.data.add_(0.01)


def replace(module: Net) -> None:
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)


def decay(module: Net) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.9)


def clip_by_lightning(module: Net) -> None:
    module.clip_gradients(module.trainer.optimizers[0], gradient_clip_val=0.01)


def around_closure(act: Callable[[Net], None]) -> type[Net]:
    class CallsClosure(Net):
        def optimizer_step(
            self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
        ) -> None:
            optimizer_closure()
            act(self)
            optimizer.step()

    return CallsClosure


def within_closure(act: Callable[[Net], None]) -> type[Net]:
    class WrapsClosure(Net):
        def optimizer_step(
            self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
        ) -> None:
            def closure() -> Any:
                loss = optimizer_closure()
                act(self)
                return loss

            optimizer.step(closure=closure)

    return WrapsClosure


ACTS: dict[Any, str] = {
    clip: "optimizer_step.* uses the gradient .*Trainer.gradient_clip_val=",
    scale: "optimizer_step.* uses the gradient .*register_hook",
    noise_through_data: "optimizer_step.* uses the gradient",
    replace: "second gradient in one step",
    decay: r"changed between backward and step\(\) \(\w+.optimizer_step may",
    clip_by_lightning: r"clip_gradients.gradient_clip_val=0.01. finds no gradients.*Write Trainer",
}


@pytest.mark.filterwarnings("ignore:RuntimeError after 4 parameters had been stepped")
@pytest.mark.filterwarnings("ignore:.*optimizer_step use .data")
@pytest.mark.parametrize("bundle_bytes", [0, 1 << 20])
@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
@pytest.mark.parametrize("place", [around_closure, within_closure])
def test_what_optimizer_step_does_to_gradients_or_weights_is_refused(place, act, bundle_bytes):
    with pytest.raises(RuntimeError, match=ACTS[act]):
        fitted(place(act), GradientRelease(bundle_bytes=bundle_bytes))


@pytest.mark.filterwarnings("ignore:RuntimeError after 4 parameters had been stepped")
def test_under_pure_bf16_too():
    with pytest.raises(RuntimeError, match="optimizer_step uses the gradient"):
        fitted(around_closure(clip), GradientRelease(), plugins=[PureBF16Precision()])
    with pytest.raises(RuntimeError, match="StepsTwice.optimizer_step steps again"):
        fitted(StepsTwice, GradientRelease(), plugins=[PureBF16Precision()])


def warm_up(module: Net) -> None:
    module.log("lr", module.trainer.optimizers[0].param_groups[0]["lr"])


class WarmsUp(Net):
    """As Lightning's own documentation does it, before the step and after it."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.001 * (batch_idx + 1)
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = 0.002 * (batch_idx + 1)


@pytest.mark.parametrize("kind", [WarmsUp, around_closure(warm_up), within_closure(warm_up)])
@pytest.mark.parametrize("clipping", [None, 0.05])
def test_other_optimizer_steps_are_exact(kind, clipping):
    assert_same(kind, gradient_clip_val=clipping)


class StepsTwice(Net):
    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        optimizer.step(closure=optimizer_closure)
        optimizer.step()


def test_a_second_step_of_the_same_gradients_is_refused():
    with pytest.raises(RuntimeError, match=r"StepsTwice.optimizer_step steps again .*once for each backward"):
        fitted(StepsTwice, GradientRelease())


class StepsEverySecond(Net):
    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


@pytest.mark.filterwarnings("ignore:RuntimeError after 4 parameters had been stepped")
def test_a_step_that_is_skipped_after_its_backward_is_refused_in_that_batch():
    with pytest.raises(RuntimeError, match=r"optimizer_step ended without optimizer.step\(\).*Return None"):
        fitted(StepsEverySecond, GradientRelease(), max_steps=1)


# A module's own backward


class EditsInBackward(Net):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)
        scale(self)


@pytest.mark.filterwarnings("ignore:RuntimeError after . parameters had been stepped")
@pytest.mark.parametrize("clipping", [None, 0.05])
def test_an_own_backward_that_edits_gradients_is_refused_or_exact(clipping):
    with pytest.raises(RuntimeError, match="EditsInBackward.backward uses the gradient"):
        fitted(EditsInBackward, GradientRelease(bundle_bytes=0), gradient_clip_val=clipping)
    if clipping is None:  # they are all alive yet, in one bucket
        assert_same(EditsInBackward, bundle_bytes=1 << 20)


# Zeroing


def zeroes(zero: Callable[[Net, Any, int], object]) -> type[Net]:
    class Zeroes(Net):
        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            zero(self, optimizer, batch_idx)

    return Zeroes


@pytest.mark.parametrize(
    "zero",
    [
        lambda module, optimizer, _: optimizer.zero_grad(set_to_none=True),
        lambda module, optimizer, _: optimizer.zero_grad(set_to_none=False),
        lambda module, optimizer, _: module.zero_grad(),
    ],
)
def test_an_own_zero_grad_that_zeroes_is_exact(zero):
    assert_same(zeroes(zero))


@pytest.mark.parametrize(
    "zero",
    [
        lambda module, optimizer, batch_idx: batch_idx % 2 or optimizer.zero_grad(),
        lambda module, *_: setattr(module.net[0].weight, "grad", None),
    ],
)
def test_an_own_zero_grad_that_keeps_gradients_is_refused(zero):
    message = r"Zeroes.optimizer_zero_grad left the gradients .* call optimizer.zero_grad\(\) in every batch"
    with pytest.raises(RuntimeError, match=message):
        fitted(zeroes(zero), GradientRelease())


def test_an_optimizers_own_zero_grad_is_looked_at_too():
    class Keeps(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            pass

    class Kept(Net):
        def configure_optimizers(self) -> Any:
            return Keeps(self.parameters(), lr=0.1)

    with pytest.raises(RuntimeError, match="Keeps.zero_grad left the gradients"):
        fitted(Kept, GradientRelease())


def test_a_gradient_of_zero_that_would_be_stepped_with_is_not_passed_over():
    class Unused(zeroes(lambda _, optimizer, __: optimizer.zero_grad(set_to_none=False))):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            layers = self.net if batch_idx == 0 else self.net[2:]
            return layers(batch if batch_idx == 0 else batch.repeat(1, 2)[:, :8]).square().mean()

    with (
        pytest.warns(UserWarning, match="of half a step"),
        pytest.raises(RuntimeError, match=r"2 parameters got no gradient.*set_to_none=True"),
    ):
        fitted(Unused, GradientRelease())


# Hooks


@pytest.mark.filterwarnings("ignore:RuntimeError after 4 parameters had been stepped")
def test_weights_that_a_hook_changes_before_the_step_are_refused():
    class Decays(Net):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            decay(self)

    message = r"changed between .* \(Decays.on_before_optimizer_step may"
    with (
        pytest.warns(UserWarning, match="must not change them"),
        pytest.raises(RuntimeError, match=message),
    ):
        fitted(Decays, GradientRelease())


class SumsLocalGradients(Net):
    """Its gradients are its own, of a weight that no optimizer has."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = nn.Parameter(torch.ones(5))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return super().training_step(batch * self.probe, batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        assert self.probe.grad is not None
        inputs = torch.ones(3, requires_grad=True)
        self.seen.append(float(torch.autograd.grad(inputs.sum(), inputs)[0].sum()))


def test_other_gradients_are_not_meant():
    assert_same(SumsLocalGradients)  # a warning would be an error


def norm_of(module: Net) -> float:
    return sum(float(p.grad.norm()) for p in module.parameters() if p.grad is not None)


class Norms(Net):
    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append(norm_of(self))


class LooksBeforeZeroing(Callback):
    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        for parameter in pl_module.parameters():
            pl_module.log("norm", 0.0 if parameter.grad is None else parameter.grad.norm())


def test_hooks_that_read_gradients_after_the_step_are_named():
    names = re.escape("Norms.on_train_batch_end, LooksBeforeZeroing.on_before_zero_grad read gradients")
    with pytest.warns(UserWarning, match=names):
        fitted(Norms, LooksBeforeZeroing(), GradientRelease(), max_steps=1)


def test_a_decay_through_data_is_named():
    def decay_data(module: Net) -> None:
        for parameter in module.parameters():
            parameter.data.mul_(0.9)

    class Decays(Net):
        def optimizer_step(
            self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
        ) -> None:
            optimizer_closure()
            decay_data(self)
            optimizer.step()

    with pytest.warns(UserWarning, match="Decays.optimizer_step use .data.*before the forward or after"):
        fitted(Decays, GradientRelease(), max_steps=1)


def test_hooks_of_a_parameter_come_before_the_release_whenever_they_were_added():
    class HooksLate(Net):
        def on_train_start(self) -> None:
            def shrink(parameter: Any) -> None:
                parameter.grad.mul_(0.1).add_(0.01)

            for parameter in self.parameters():
                parameter.register_post_accumulate_grad_hook(shrink)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "HooksLate.on_train_start read gradients")
        assert_same(HooksLate, gradient_clip_val=0.05)


# Optimizers exchanged during the fit


def exchanges(hook: str, by_strategy: bool) -> type[Net]:
    class Exchanges(Net):
        def exchange(self, batch_idx: int) -> None:
            if batch_idx == 2 and by_strategy:
                self.trainer.strategy.setup_optimizers(self.trainer)
            elif batch_idx == 2:
                self.trainer.optimizers = [torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)]

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if hook == "on_train_batch_start":
                self.exchange(batch_idx)

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            if hook == "training_step":
                self.exchange(batch_idx)
            return super().training_step(batch, batch_idx)

    return Exchanges


@pytest.mark.parametrize("clipping", [None, 0.05])
@pytest.mark.parametrize("by_strategy", [True, False])
@pytest.mark.parametrize("hook", ["on_train_batch_start", "training_step"])
def test_an_exchanged_optimizers_gradients_are_released(hook, by_strategy, clipping):
    kind = exchanges(hook, by_strategy)
    assert_same(kind, max_steps=6, gradient_clip_val=clipping)
    released = GradientRelease(bundle_bytes=0)
    alive = []

    class Looks(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            alive.append(release_of(trainer.optimizers[0]) is not None)

    module, run = fitted(kind, released, Looks(), max_steps=6)
    assert alive == [True, True, hook == "on_train_batch_start", True, True, True]
    assert release_of(run.optimizers[0]) is None
    assert not any(p._post_accumulate_grad_hooks for p in module.parameters())  # pyright: ignore
    assert not {"clip_gradients", "optimizer_step"} & set(vars(run.precision_plugin))


@pytest.mark.filterwarnings("ignore:RuntimeError after")
def test_an_optimizer_that_takes_the_others_place_is_checked_and_the_teardown_hides_no_error():
    class Unreleasable(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                self.trainer.optimizers = [torch.optim.LBFGS(self.parameters())]

    class Fails(exchanges("on_train_batch_start", True)):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            if batch_idx == 2:
                raise ZeroDivisionError("here")
            return super().training_step(batch, batch_idx)

    with pytest.raises(TypeError, match="LBFGS.step demands a closure"):
        fitted(Unreleasable, GradientRelease())
    with pytest.raises(ZeroDivisionError, match="here"):
        fitted(Fails, GradientRelease())


def test_within_a_memory_budget_too():
    def run(*callbacks: Callback) -> Tensor:
        return weights(fitted(zeroes(lambda _, optimizer, __: optimizer.zero_grad()), *callbacks)[0])

    budget = MemoryBudget("1GiB", micro_batch_size=4, recover=False)
    assert torch.equal(run(), run(budget, GradientRelease(bundle_bytes=0)))
