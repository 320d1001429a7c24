"""State that a step changes on parameters and in optimizers, which may be exchanged. The oracle is Lightning's run."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_memkit import MemoryBudget
from lightning_memkit.micro_batching.sizes.sizing import BudgetError

FAILS_IN, STEPS = 2, 5
FAILURES: list[int] = []  # a variable of a Python module, which a retry does not restore


class Net(LightningModule):
    """A classifier in float64."""

    scale: Any

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        self.register_buffer("scale", torch.ones(1).double())
        self.prepared()

    @property
    def weight(self) -> Any:
        return self.net[0].weight

    def prepared(self) -> None:
        """What a test's module sets up."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self.net(batch["x"]), batch["y"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        run_out(self)  # when all that a test's module changes has changed

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), 0.01)


def run_out(module: Net) -> None:
    if module.global_step == FAILS_IN and FAILURES:
        FAILURES.pop()
        raise torch.OutOfMemoryError("made to fail")


def loader() -> DataLoader:
    generator = torch.Generator().manual_seed(5)
    rows: Any = [
        {"x": torch.randn(5, generator=generator).double(), "y": index % 3} for index in range(8 * STEPS)
    ]
    return DataLoader(rows, 8)


def fit(kind: type[Net], *callbacks: Callback) -> Net:
    torch.manual_seed(1)
    module = kind()
    options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    options |= {"enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 1}
    Trainer(callbacks=list(callbacks), **options).fit(module, loader())
    return module


def fit_split(kind: type[Net], size: int = 3) -> Net:
    return fit(kind, MemoryBudget("1GiB", micro_batch_size=size, within="step"))


def fit_failing(kind: type[Net]) -> Net:
    FAILURES.append(1)
    ours = fit_split(kind, 8)
    assert not FAILURES
    return ours


def assert_alike(ours: Net, plain: Net) -> None:
    for name, value in plain.net.state_dict().items():
        torch.testing.assert_close(ours.net.state_dict()[name], value, rtol=1e-12, atol=1e-14, msg=name)


# Attributes of parameters and buffers


class Counts(Net):
    def prepared(self) -> None:
        self.weight.n = self.scale.n = 0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.weight.n += 1
        self.scale.n += 1
        return self.loss(batch) * 0.9 ** (self.weight.n + self.scale.n)


class Holds(Net):
    def prepared(self) -> None:
        self.weight.stats = {"n": 0}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.weight.stats["n"] += 1
        return self.loss(batch) * 0.9 ** self.weight.stats["n"]


class Sets(Net):
    """The step is the first to set the attribute."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if not hasattr(self.weight, "first"):
            self.weight.first = self.weight.detach().clone()
        return self.loss(batch) + (self.weight - self.weight.first).square().sum()


class Averages(Net):
    def prepared(self) -> None:
        for parameter in self.parameters():
            parameter.average = parameter.detach().clone()  # pyright: ignore[reportAttributeAccessIssue]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        parameters: list[Any] = list(self.net.parameters())
        with torch.no_grad():
            for parameter in parameters:
                parameter.average.lerp_(parameter, 0.3)
        return self.loss(batch) + sum((one - one.average).square().sum() for one in parameters)


class Assigns(Averages):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        parameters: list[Any] = list(self.net.parameters())
        for parameter in parameters:
            parameter.average = parameter.average * 0.7 + parameter.detach() * 0.3
        return self.loss(batch) + sum((one - one.average).square().sum() for one in parameters)


class CountsInAHook(Net):
    def prepared(self) -> None:
        self.weight.n = 0

    def on_after_backward(self) -> None:
        self.weight.n += 1
        for parameter in self.net.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(self.weight.n)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [Counts, Holds, Sets, Averages, Assigns, CountsInAHook])
@pytest.mark.long
def test_attributes_of_tensors_end_as_without_the_trials_and_retries(kind: type[Net]) -> None:
    plain = fit(kind)
    assert_alike(fit_split(kind, 8), plain)
    assert_alike(fit_failing(kind), plain)


@pytest.mark.parametrize("kind", [Counts, Sets, CountsInAHook])
@pytest.mark.long
def test_attributes_of_tensors_that_compose_are_the_whole_batch_s(kind: type[Net]) -> None:
    assert_alike(fit_split(kind), fit(kind))


@pytest.mark.parametrize(
    ("kind", "name"),
    [(Holds, r"weight\.stats"), (Averages, r"weight\.average"), (Assigns, r"weight\.average")],
)
@pytest.mark.long
def test_attributes_of_tensors_that_do_not_compose_are_refused_by_name(kind: type[Net], name: str) -> None:
    with pytest.raises(BudgetError, match=name):
        fit_split(kind)


# The optimizer's states and settings


def damp(module: Net) -> None:
    for state in module.trainer.optimizers[0].state.values():
        state["exp_avg"].mul_(0.5)


class DampsInTheStep(Net):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        damp(self)
        return self.loss(batch)


class DampsWhenLossesRise(Net):
    def prepared(self) -> None:
        self.last = float("inf")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if float(loss) > self.last:
            damp(self)
        self.last = float(loss)
        return loss


class ReplacesInTheStep(Net):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        for state in self.trainer.optimizers[0].state.values():
            state["exp_avg"] = state["exp_avg"] * 0.5
        return self.loss(batch)


class Resets(Net):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if self.global_step == FAILS_IN:
            self.trainer.optimizers[0].state.clear()
        return self.loss(batch)


class LateRate(Net):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if self.global_step >= FAILS_IN:
            self.trainer.optimizers[0].param_groups[0]["lr"] *= 0.5
        return self.loss(batch)


class Cautious(Net):
    """Damps a moment where it disagrees with the gradient."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        for parameter in self.net.parameters():
            if optimizer.state[parameter]:
                moment = optimizer.state[parameter]["exp_avg"]
                moment.mul_(torch.where(moment * parameter.grad < 0, 0.5, 1.0))


class GathersInStates(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), 0.1)

    def configure_gradient_clipping(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        for parameter in self.net.parameters():
            assert parameter.grad is not None
            state = optimizer.state[parameter]
            state["sum"] = state.get("sum", 0) + parameter.grad.norm()
            parameter.grad.div_(state["sum"])
        super().configure_gradient_clipping()


@pytest.mark.parametrize(
    "kind", [DampsInTheStep, ReplacesInTheStep, Resets, LateRate, Cautious, GathersInStates]
)
@pytest.mark.long
def test_what_is_changed_in_the_optimizer_is_restored_before_a_retry(kind: type[Net]) -> None:
    assert_alike(fit_failing(kind), fit(kind))


@pytest.mark.parametrize("kind", [Resets, Cautious, GathersInStates])
def test_states_changed_alike_or_once_a_step_do_not_keep_batches_whole(kind: type[Net]) -> None:
    assert_alike(fit_split(kind), fit(kind))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (DampsInTheStep, r"optimizers\[0\]\.state\[net\.0\.weight\]\['exp_avg'\] \(optimizer state\)"),
        (DampsWhenLossesRise, r"optimizers\[0\]\.state\[net\.0\.weight\]\['exp_avg'\] \(optimizer state\)"),
        (ReplacesInTheStep, r"optimizers\[0\]\.state\[net\.0\.weight\]\['exp_avg'\] \(optimizer state\)"),
        (LateRate, r"optimizers\[0\]\.param_groups\[0\]"),
    ],
)
@pytest.mark.filterwarnings("ignore:The step that is retried had changed optimizers.*exp_avg")
def test_states_and_settings_that_the_step_changes_are_refused_by_name(kind: type[Net], name: str) -> None:
    with pytest.raises(BudgetError, match=name):
        fit_split(kind)


class DampsLate(Net):
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        if self.global_step == FAILS_IN:
            damp(self)


def test_a_state_that_a_hook_was_the_first_to_change_is_named_where_it_is_not_restored() -> None:
    with pytest.warns(UserWarning, match=r"had changed .*\[net\.0\.weight\]\['exp_avg'\].* not exact"):
        fit_failing(DampsLate)


# Exchanged optimizers


class Exchanges(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == FAILS_IN:
            self.trainer.optimizers = [torch.optim.SGD(self.net.parameters(), 0.1, momentum=0.9)]


class SetsUpAnew(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == FAILS_IN:
            self.trainer.strategy.setup_optimizers(self.trainer)


@pytest.mark.parametrize("kind", [Exchanges, SetsUpAnew])
def test_an_exchanged_optimizer_is_journaled_and_undone(kind: type[Net]) -> None:
    plain = fit(kind)
    assert_alike(fit_split(kind), plain)
    assert_alike(fit_failing(kind), plain)


# Running averages


class Averaging(Net):
    def prepared(self) -> None:
        self.norm = nn.InstanceNorm1d(1, track_running_stats=True).double()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self.net(self.norm(batch["x"][:, None])[:, 0]), batch["y"])


def test_running_averages_of_rows_by_themselves_are_named_and_gradients_are_exact() -> None:
    with pytest.warns(UserWarning, match=r"norm keep running averages .*track_running_stats=True"):
        ours = fit_split(Averaging)
    assert_alike(ours, fit(Averaging))
