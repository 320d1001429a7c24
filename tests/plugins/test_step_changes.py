"""What a step changes besides gradients: trials put it back, and say its name. The oracle is Lightning's own run."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, SumMetric

from lightning_memkit import MemoryBudget
from lightning_memkit.micro_batching.proof.lazy_modules import materialized
from lightning_memkit.micro_batching.proof.trial_values import StepFailedError
from tests.plugins.toys import trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*normalize with statistics of the batch:UserWarning")

Change = Callable[[Any, dict[str, Tensor], Tensor], object]


class Notes:
    """A plain object, which refers to itself, with slots below it."""

    made = 0

    class Slotted:
        __slots__ = ("count",)

        def __init__(self) -> None:
            self.count = 0

    def __init__(self) -> None:
        self.me, self.slotted, self.sums = self, Notes.Slotted(), {"x": [torch.zeros(3)]}

    def hit(self, x: Tensor) -> None:
        self.slotted.count += 1
        self.sums["x"][0] += x.sum(0)
        Notes.made += 1


class Student(LightningModule):
    """A student that follows a teacher; what else its step does is given."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.net, self.change = nn.Linear(3, 3), change
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.register_buffer("queue", torch.zeros(4, 3))
        self.n, self.total, self.table = 0, 0.0, None
        self.outs: list[Tensor] = []
        self.notes, self.array, self.draws = Notes(), np.zeros(2), np.random.default_rng(0)
        self.sum, self.mean = SumMetric(), MeanMetric()
        self.counted = 0

        def count(gradient: Tensor) -> None:
            nonlocal calls
            calls += 1
            self.counted = calls

        calls = 0
        self.hook = functools.partial(count)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if self.change is divide:  # autograd refuses it afterwards
            divide(self, batch, batch["x"])
        loss = (self.net(batch["x"]) - self.teacher(batch["x"]) - 1).square().mean()
        with torch.no_grad():
            if self.change is not divide:
                self.change(self, batch, loss.detach())
        return loss * 0.9**self.n * (1 + 0.1 * self.counted)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), 0.1)


def fitted(change: Change, *callbacks: Any) -> Student:
    generator = torch.Generator().manual_seed(0)
    data: Any = [{"x": torch.randn(3, generator=generator)} for _ in range(21)]
    torch.manual_seed(0)
    module = Student(change)
    trainer(*callbacks, max_steps=3).fit(module, DataLoader(data, batch_size=7))
    return module


def state(module: Student) -> dict[str, Any]:
    notes = {"hits": module.notes.slotted.count, "sums": module.notes.sums["x"][0]}
    kept = {
        "n": module.n,
        "total": module.total,
        "outs": module.outs,
        "array": module.array,
        "at": module.counted,
    }
    drawn = {"draw": module.draws.random(), "sum": module.sum.sum_value}
    return {**module.state_dict(), **notes, **kept, **drawn}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, (Tensor, np.ndarray)):
        return bool((a == b).all())
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def ema(module: Any, *_: Any) -> None:
    for slow, fast in zip(module.teacher.parameters(), module.net.parameters(), strict=True):
        slow.lerp_(fast, 0.1)


def ema_by_lists(module: Any, *_: Any) -> None:
    slow = [p.data for p in module.teacher.parameters()]
    torch._foreach_mul_(slow, 0.9)
    torch._foreach_add_(slow, list(module.net.parameters()), alpha=0.1)


def ema_by_assignment(module: Any, *_: Any) -> None:
    for slow, fast in zip(module.teacher.parameters(), module.net.parameters(), strict=True):
        slow.data = 0.9 * slow.data + 0.1 * fast.data


def clamp(module: Any, *_: Any) -> None:
    module.net.weight.data.view(-1)[:4].mul_(0.5)


def queue(module: Any, batch: dict[str, Tensor], loss: Tensor) -> None:
    module.queue.copy_(torch.cat([batch["x"][:1], module.queue[:-1]]))


def count(module: Any, *_: Any) -> None:
    module.n += 1


def gather(module: Any, batch: dict[str, Tensor], loss: Tensor) -> None:
    module.outs.append(loss)


def gather_rows(module: Any, batch: dict[str, Tensor], loss: Tensor) -> None:
    module.outs.append(batch["x"].clone())


def sum_rows(module: Any, batch: dict[str, Tensor], loss: Tensor) -> None:
    module.total += float(batch["x"].double().sum())


def note(module: Any, batch: dict[str, Tensor], loss: Tensor) -> None:
    module.notes.hit(batch["x"])


def array(module: Any, *_: Any) -> None:
    module.array += 1


def draw(module: Any, batch: dict[str, Tensor], loss: Tensor) -> None:
    module.total = module.draws.random()


def hook(module: Any, *_: Any) -> None:
    module.hook(None)


def divide(module: Any, batch: dict[str, Tensor], loss: Tensor) -> None:
    batch["x"].div_(255)


def add_metric(module: Any, batch: dict[str, Tensor], loss: Tensor) -> None:
    module.sum.update(batch["x"])


def average_losses(module: Any, batch: dict[str, Tensor], loss: Tensor) -> None:
    module.mean.update(loss)


CHANGES: dict[Change, tuple[str, str, bool]] = {
    ema: ("parameter", "teacher.weight", False),
    ema_by_lists: ("parameter", "teacher.weight", False),
    ema_by_assignment: ("parameter", "teacher.weight", False),
    clamp: ("parameter", "net.weight", False),
    queue: ("buffer", "queue", False),
    count: ("attribute", "n", False),
    gather: ("container", "outs", False),
    gather_rows: ("container", "outs", True),
    sum_rows: ("attribute", "total", True),
    note: ("object", "notes.slotted.count", False),
    array: ("attribute", "array", False),
    draw: ("generator", "draws", False),
    hook: ("object", "hook.calls", False),
    divide: ("batch", "batch['x']", True),
    add_metric: ("metric", "sum", True),
    average_losses: ("metric", "mean", False),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_trials_put_back_what_the_step_changes_and_say_its_name(change: Change) -> None:
    budget = MemoryBudget("1GiB", micro_batch_size=7)
    plain, whole = state(fitted(change)), state(fitted(change, budget))
    assert [name for name in plain if not same(plain[name], whole[name])] == []
    assert budget._engine is not None
    found = {(one.kind, one.name, one.composes) for one in budget._engine.trials.changes}
    assert CHANGES[change] in found


def test_what_only_the_first_step_sets_up_is_no_change() -> None:
    def cache(module: Any, batch: dict[str, Tensor], loss: Tensor) -> None:
        if module.table is None:
            module.table = torch.ones(3)
        module.queue.clone()

    budget = MemoryBudget("1GiB", micro_batch_size=7)
    fitted(cache, budget)
    assert budget._engine is not None
    assert budget._engine.trials.changes == ()


def test_lazy_modules_draw_their_weights_in_the_first_step_itself() -> None:
    class Lazy(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.LazyLinear(8), nn.Dropout(0.5), nn.LazyBatchNorm1d(), nn.LazyLinear(1)
            )

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 0.1)

    class Budget(MemoryBudget):
        def prepare(self, step: Any) -> None:
            assert self._engine is not None
            with materialized(step, self._engine.trials):
                super().prepare(step)

    def trained(*callbacks: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        module, data = Lazy(), torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
        trainer(*callbacks, max_steps=3).fit(module, DataLoader(data, batch_size=8))  # pyright: ignore
        return module.state_dict()

    plain, whole = trained(), trained(Budget("1GiB", micro_batch_size=8))
    assert plain.keys() == whole.keys()
    assert all(torch.equal(plain[name], whole[name]) for name in plain)


def test_a_size_at_which_the_step_fails_is_told_from_a_step_that_fails() -> None:
    class Normed(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.norm, self.broken = nn.Linear(3, 3), nn.BatchNorm1d(3), False

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if self.broken:
                raise IndexError("mine")
            return self.norm(self.net(batch)).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    seen: list[type[BaseException]] = []

    class Asks(MemoryBudget):
        def prepare(self, step: Any) -> None:
            trials: Any = self._engine and self._engine.trials
            with pytest.raises(StepFailedError, match="more than 1 value per channel") as failed:
                trials.peak_of(step, step.batch[:1], [], None)
            assert isinstance(failed.value.cause, ValueError)
            module = step.trainer.lightning_module
            module.broken = True
            with pytest.raises(IndexError, match="mine") as caught:
                trials.peak_of(step, step.batch, [], None)
            assert "training_step" in [entry.name for entry in caught.traceback]
            module.broken = False
            seen.append(type(failed.value))
            super().prepare(step)

    data: Any = torch.randn(8, 3)
    trainer(Asks("1GiB", micro_batch_size=8), max_steps=1).fit(Normed(), DataLoader(data, batch_size=8))
    assert seen == [StepFailedError]
