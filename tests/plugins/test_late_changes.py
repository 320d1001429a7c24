"""What a step does only after all trials: late state, skipped rows, hooks. The oracle is Lightning's own run."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_memkit import MemoryBudget
from lightning_memkit.micro_batching.sizes.sizing import BudgetError
from lightning_memkit.testing import fail_at

LATE, STEPS = 4, 6
FORWARDS: list[int] = []  # rows of each, in no state that is restored
Step = Callable[[Any, dict[str, Tensor]], Tensor | None]


class Net(LightningModule):
    """A classifier in float64 whose step is given."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        for parameter in self.teacher.parameters():
            parameter.data.fill_(1.0)
        self.register_buffer("queue", torch.full((4, 3), 0.1).double())
        self.n, self.hits, self.mask = 0, 0, None
        self.phase, self.losses, self.cfg = "early", [], {"weight": 1.0}
        self.scores, self.step = np.ones(20000), step

    @property
    def is_late(self) -> bool:
        return self.global_step >= LATE

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self.net(batch["x"]), batch["y"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor | None:
        FORWARDS.append(len(batch["x"]))
        return self.step(self, batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), 0.1)


def rows(change: Callable[[int, dict[str, Any]], None] = lambda index, row: None) -> Any:
    generator = torch.Generator().manual_seed(5)
    found = []
    for index in range(8 * STEPS):
        x = torch.randn(5, generator=generator).double()
        found.append({"x": x, "y": int(torch.randint(0, 3, (), generator=generator))})
        change(index, found[-1])
    return found


class Faulty(MemoryBudget):
    """Lets one allocation of the late step fail."""

    faults: Any = None

    def prepare(self, step: Any) -> None:
        super().prepare(step)
        if self.faults is not None and step.trainer.global_step == LATE:
            self.faults.arm()


class Disarmed(Callback):
    def __init__(self, faults: Any) -> None:
        self.faults = faults

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step > LATE:
            self.faults.disarm()


def fit(
    step: Step, size: int | None, data: Any = None, kind: type[Net] = Net, fault: int | None = None
) -> Net:
    torch.manual_seed(1)
    module = kind(step)
    callbacks: list[Callback] = [] if size is None else [Faulty("1GiB", micro_batch_size=size, within="step")]
    options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    options |= {"enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 1}
    if fault is None:
        Trainer(callbacks=callbacks, **options).fit(module, DataLoader(data or rows(), 8))
        return module
    with fail_at(fault, armed=False) as faults:
        callbacks[0].faults = faults  # pyright: ignore[reportAttributeAccessIssue]
        Trainer(callbacks=[*callbacks, Disarmed(faults)], **options).fit(
            module, DataLoader(data or rows(), 8)
        )
    assert faults.fault is not None
    return module


def assert_alike(ours: Net, plain: Net) -> None:
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-12, atol=1e-14, msg=name)
    assert (ours.n, ours.hits, ours.phase, ours.cfg) == (plain.n, plain.hits, plain.phase, plain.cfg)
    assert np.array_equal(ours.scores, plain.scores)
    assert ours.losses == pytest.approx(plain.losses, abs=1e-12)


def counts(net: Any, batch: dict[str, Tensor]) -> Tensor:
    net.n += net.is_late
    return net.loss(batch) * 0.9**net.n


def lists_its_loss(net: Any, batch: dict[str, Tensor]) -> Tensor:
    loss = net.loss(batch)
    if net.is_late:
        net.losses.append(loss.item())
    return loss


def changes_its_phase(net: Any, batch: dict[str, Tensor]) -> Tensor:
    if net.is_late:
        net.phase = "late"
    return net.loss(batch) * (2.0 if net.phase == "late" else 1.0)


def sets_what_is_there(net: Any, batch: dict[str, Tensor]) -> Tensor:
    if net.is_late:
        net.phase, net.cfg = "".join(["ear", "ly"]), {"weight": 1.0}
    return net.loss(batch)


def builds_a_mask(net: Any, batch: dict[str, Tensor]) -> Tensor:
    if net.is_late and net.mask is None:
        net.mask = torch.linspace(0, 1, 5).double()
    return net.loss(batch if net.mask is None else {**batch, "x": batch["x"] * net.mask})


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    "step", [counts, lists_its_loss, changes_its_phase, sets_what_is_there, builds_a_mask]
)
def test_late_state_that_composes_is_the_whole_batch_s(step: Step, size: int) -> None:
    assert_alike(fit(step, size), fit(step, None))


def averages(net: Any, batch: dict[str, Tensor]) -> Tensor:
    if net.is_late:
        with torch.no_grad():
            for slow, fast in zip(net.teacher.parameters(), net.net.parameters(), strict=True):
                slow.lerp_(fast, 0.3)
    return net.loss(batch) + F.mse_loss(net.net(batch["x"]), net.teacher(batch["x"]))


def averages_past_versions(net: Any, batch: dict[str, Tensor]) -> Tensor:
    if net.is_late:
        for slow in net.teacher.parameters():
            slow.data.mul_(0.7)
    return net.loss(batch) + 0.1 * F.mse_loss(net.net(batch["x"]), net.teacher(batch["x"]))


def fills_a_queue(net: Any, batch: dict[str, Tensor]) -> Tensor:
    scores = net.net(batch["x"])
    loss = F.cross_entropy(scores + net.queue.mean(0), batch["y"])
    if net.is_late:
        net.queue = torch.cat([scores.detach(), net.queue])[:4]
    return loss


def writes_to_a_buffer(net: Any, batch: dict[str, Tensor]) -> Tensor:
    scores = net.net(batch["x"])
    if net.is_late:
        net.queue[0] = scores.detach().mean(0)
    return F.cross_entropy(scores + net.queue.mean(0), batch["y"])


def writes_to_an_array(net: Any, batch: dict[str, Tensor]) -> Tensor:
    loss = net.loss(batch) * float(net.scores[7])
    if net.is_late:
        net.scores *= 0.9
    return loss


def averages_unfrozen(net: Any, batch: dict[str, Tensor]) -> Tensor:
    if net.is_late:
        with torch.no_grad():
            for slow, fast in zip(net.teacher.parameters(), net.net.parameters(), strict=True):
                slow.lerp_(fast, 0.3)
    with torch.no_grad():
        wanted = net.teacher(batch["x"])
    return net.loss(batch) + F.mse_loss(net.net(batch["x"]), wanted)


CHANGES = [averages, averages_past_versions, fills_a_queue, writes_to_a_buffer, writes_to_an_array]


class Unfrozen(Net):
    """As adapters make of a frozen teacher: it would be trained, if its forward had a gradient."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self.teacher.requires_grad_(True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize(
    ("step", "kind"), [*((step, Net) for step in CHANGES), (averages_unfrozen, Unfrozen)]
)
@pytest.mark.long
def test_late_state_that_does_not_compose_is_refused_before_it_does_harm(step: Step, kind: type[Net]) -> None:
    kept: list[dict[str, Any]] = []

    class Watched(kind):
        def on_train_batch_start(self, *args: Any) -> None:
            kept.append({**copy.deepcopy(dict(self.state_dict())), "scores": self.scores.copy()})

        def on_exception(self, error: BaseException) -> None:
            pass

    seen: list[Net] = []

    def recorded(net: Any, batch: dict[str, Tensor]) -> Tensor | None:
        seen[:] = [net]
        return step(net, batch)

    with pytest.raises(BudgetError, match=r"training_step changes .*(teacher|queue|scores)"):
        fit(recorded, 3, kind=Watched)
    for name, value in seen[0].state_dict().items():
        assert torch.equal(value, kept[LATE][name]), name
    assert np.array_equal(seen[0].scores, kept[LATE]["scores"])


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("step", "kind"), [*((step, Net) for step in (counts, *CHANGES)), (averages_unfrozen, Unfrozen)]
)
@pytest.mark.parametrize("fault", [3, 15])
def test_a_late_change_is_undone_before_a_retry(step: Step, kind: type[Net], fault: int) -> None:
    assert_alike(fit(step, 8, kind=kind, fault=fault), fit(step, None, kind=kind))


def test_a_counter_of_rare_rows_is_refused() -> None:
    def rare(index: int, row: dict[str, Any]) -> None:
        row["rare"] = float(index in (8 * LATE + 1, 8 * LATE + 7, 8 * LATE + 12))

    def step(net: Any, batch: dict[str, Tensor]) -> Tensor:
        net.hits += bool(batch["rare"].any())
        return net.loss(batch) * (1 + 0.5 * net.hits)

    with pytest.raises(BudgetError, match="changes hits|hands values on"):
        fit(step, 3, data=rows(rare))


def nan_row(index: int, row: dict[str, Any]) -> None:
    if index == 8 * LATE + 1:
        row["x"] = row["x"] * float("nan")


def large_row(index: int, row: dict[str, Any]) -> None:
    if index == 8 * LATE + 1:
        row["x"] = row["x"] * 200


def is_finite(net: Any, batch: dict[str, Tensor]) -> Tensor | None:
    loss = net.loss(batch)
    return loss if loss.isfinite() else None


def is_no_spike(net: Any, batch: dict[str, Tensor]) -> Tensor | None:
    loss = F.mse_loss(net.net(batch["x"]) + batch["x"][:, :3], batch["x"][:, 1:4])
    return loss if loss.item() < 50 else None


def sums_are_no_spikes(net: Any, batch: dict[str, Tensor]) -> Tensor | None:
    loss = (net.net(batch["x"]) + batch["x"][:, :3]).square().sum()
    return loss if loss.item() < 5000 else None


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    ("step", "change"), [(is_finite, nan_row), (is_no_spike, large_row), (sums_are_no_spikes, large_row)]
)
@pytest.mark.filterwarnings("ignore:.*returned `None`")
def test_a_batch_that_the_step_skips_is_skipped_whole(step: Step, change: Any, size: int) -> None:
    ours = fit(step, size, data=rows(change))
    assert_alike(ours, fit(step, None, data=rows(change)))
    assert all(parameter.isfinite().all() for parameter in ours.parameters())


def test_rows_that_are_skipped_in_micro_batches_only_are_refused() -> None:
    def mostly_no_spike(net: Any, batch: dict[str, Tensor]) -> Tensor | None:
        loss = F.mse_loss(net.net(batch["x"]) + batch["x"][:, :3], batch["x"][:, 1:4])
        return loss if loss.item() < 2000 else None

    def spike(index: int, row: dict[str, Any]) -> None:
        if index == 8 * LATE + 1:
            row["x"] = torch.tensor([100.0, 0, 0, 0, 0]).double()

    with pytest.raises(BudgetError, match="returns None for some micro-batches"):
        fit(mostly_no_spike, 1, data=rows(spike))


def test_micro_batches_without_a_label_need_no_look_at_the_whole_batch() -> None:
    def unlabelled(index: int, row: dict[str, Any]) -> None:
        row["labels"] = row["y"] if index % 8 > 3 else -100

    def step(net: Any, batch: dict[str, Tensor]) -> Tensor | None:
        if (batch["labels"] == -100).all():
            return None
        return F.cross_entropy(net.net(batch["x"]), batch["labels"])

    forwards: list[int] = []

    class Counted(Net):
        def on_train_batch_end(self, *args: Any) -> None:
            forwards.append(len(FORWARDS))

    ours = fit(step, 2, data=rows(unlabelled), kind=Counted)
    assert FORWARDS[forwards[-2] : forwards[-1]] == [2] * 4
    assert_alike(ours, fit(step, None, data=rows(unlabelled)))


class Averaged(Net):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.n += 1
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                slow.lerp_(fast, 0.3)


def reads_it(net: Any, batch: dict[str, Tensor]) -> Tensor:
    return net.loss(batch) + F.mse_loss(net.net(batch["x"]), net.teacher(batch["x"]))


def reads_it_by_its_table(net: Any, batch: dict[str, Tensor]) -> Tensor:
    pairs = zip(net.net.parameters(), net.teacher.parameters(), strict=True)
    return net.loss(batch) + sum(((a - b).square().sum() for a, b in pairs), start=torch.zeros(()))


def reads_a_number(net: Any, batch: dict[str, Tensor]) -> Tensor:
    return net.loss(batch) * 0.9**net.n


@pytest.mark.parametrize("step", [reads_it, reads_it_by_its_table, reads_a_number])
def test_a_hook_before_zero_grad_that_changes_what_the_step_reads_is_refused(step: Step) -> None:
    with pytest.raises(BudgetError, match="Averaged.on_before_zero_grad changes"):
        fit(step, 3, kind=Averaged)


def test_a_hook_before_zero_grad_may_change_what_the_step_does_not_read() -> None:
    ours = fit(Net.loss, 3, kind=Averaged)
    assert_alike(ours, fit(Net.loss, None, kind=Averaged))
