"""State that a step sets once, late or rarely, and lists that lose items. The oracle is Lightning's own run."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_memkit import MemoryBudget
from lightning_memkit.micro_batching.sizes.sizing import BudgetError
from tests.plugins.toys import trainer

LATE, STEPS = 4, 7
ROWS: list[int] = []  # of each forward, in no state that is restored
Step = Callable[[Any, dict[str, Tensor], int], Tensor]


class Net(LightningModule):
    """A classifier in float64 whose step is given; `kept` is what the step sets."""

    rope: Any

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
        self.n, self.step = 0, step
        self.kept: Any = None
        self.best: Any = float("inf")
        self.phase, self.center = "early", torch.zeros(4).double()
        self.losses: list[Any] = []
        self.means: list[Any] = []
        self.cache: dict[int, Tensor] = {}

    def scores(self, batch: dict[str, Tensor]) -> Tensor:
        return self.net(batch["x"])

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self.scores(batch), batch["y"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        ROWS.append(len(batch["x"]))
        return self.step(self, batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(step: Step, size: int | None) -> Net:
    generator = torch.Generator().manual_seed(5)
    data: Any = [
        {
            "x": torch.randn(6, generator=generator).double(),
            "y": int(torch.randint(0, 4, (), generator=generator)),
        }
        for _ in range(8 * STEPS)
    ]
    torch.manual_seed(1)
    module = Net(step)
    budget = [] if size is None else [MemoryBudget("1GiB", micro_batch_size=size, within="step")]
    trainer(*budget, max_steps=STEPS).fit(module, DataLoader(data, batch_size=8))
    return module


def assert_alike(ours: Net, plain: Net) -> None:
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-12, atol=1e-14, msg=name)
    for name in ("n", "kept", "best", "phase", "center", "losses", "means"):
        one, other = getattr(ours, name), getattr(plain, name)
        if isinstance(other, str):
            assert one == other, name
        else:
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14, msg=name)


def divides_by_the_first_loss(net: Any, batch: dict[str, Tensor], index: int) -> Tensor:
    loss = net.loss(batch)
    if net.kept is None:
        net.kept = loss.item()
    return loss / net.kept if index >= LATE else loss


def keeps_the_first_batch(net: Any, batch: dict[str, Tensor], index: int) -> Tensor:
    if net.kept is None:
        net.kept = batch["x"]
    return net.loss(batch) + (net.net(net.kept).square().mean() if index >= LATE else 0)


def counts_every_third(net: Any, batch: dict[str, Tensor], index: int) -> Tensor:
    net.n += 1
    if net.n % 3 == 0:
        net.means.append(net.n)
        net.center = net.center + 1
    return net.loss(batch) * 0.9 ** len(net.means)


def centers_every_fourth(net: Any, batch: dict[str, Tensor], index: int) -> Tensor:
    scores = net.scores(batch)
    if index % 4 == 3:
        net.center = scores.detach().mean(0)
    return F.cross_entropy(scores, batch["y"]) + (index % 4 < 3) * (scores - net.center).square().mean()


def sets_and_clears(net: Any, batch: dict[str, Tensor], index: int) -> Tensor:
    scores = net.scores(batch)
    if index % 3 == 0:
        net.kept = scores.detach().mean(0)
    if index % 3 == 2:
        net.kept = None
    return F.cross_entropy(scores, batch["y"])


def keeps_the_last_three(net: Any, batch: dict[str, Tensor], index: int) -> Tensor:
    loss = net.loss(batch)
    net.losses.append(loss.item())
    net.losses = net.losses[-3:]
    return loss


def pops_the_oldest(net: Any, batch: dict[str, Tensor], index: int) -> Tensor:
    loss = net.loss(batch)
    net.losses.append(loss.item())
    if len(net.losses) > 3:
        net.losses.pop(0)
    return loss


def flushes(net: Any, batch: dict[str, Tensor], index: int) -> Tensor:
    loss = net.loss(batch)
    net.losses.append(loss.item())
    if len(net.losses) == 4:
        net.means.append(sum(net.losses) / 4)
        net.losses.clear()
    return loss


def flushes_anew(net: Any, batch: dict[str, Tensor], index: int) -> Tensor:
    loss = net.loss(batch)
    net.losses.append(loss.item())
    if len(net.losses) == 4:
        net.means.append(sum(net.losses) / 4)
        net.losses = []
    return loss


def lists_features_anew(net: Any, batch: dict[str, Tensor], index: int) -> Tensor:
    scores = net.scores(batch)
    net.losses.clear()
    net.losses.append(scores.detach())
    return F.cross_entropy(scores, batch["y"])


def lists_rows(net: Any, batch: dict[str, Tensor], index: int) -> Tensor:
    scores = net.scores(batch)
    net.losses.append(scores.detach())
    if len(net.losses) == 4:
        net.losses.clear()
    return F.cross_entropy(scores, batch["y"])


COMPOSED = [
    divides_by_the_first_loss, keeps_the_first_batch, counts_every_third, centers_every_fourth, sets_and_clears,
    keeps_the_last_three, pops_the_oldest, flushes, flushes_anew, lists_features_anew, lists_rows,
]  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("step", COMPOSED, ids=lambda step: step.__name__)
@pytest.mark.long
def test_what_is_set_once_or_rarely_is_the_whole_batch_s(step: Step) -> None:
    assert_alike(fit(step, 3), fit(step, None))


def builds_a_table(net: Any, batch: dict[str, Tensor], index: int) -> Tensor:
    if not hasattr(net, "rope"):
        net.rope = torch.linspace(0.5, 1, 6).double()
    return net.loss({**batch, "x": batch["x"] * net.rope})


def registers_a_table(net: Any, batch: dict[str, Tensor], index: int) -> Tensor:
    if not hasattr(net, "rope"):
        net.register_buffer("rope", torch.linspace(0.5, 1, 6).double())
    return net.loss({**batch, "x": batch["x"] * net.rope})


def caches_by_rows(net: Any, batch: dict[str, Tensor], index: int) -> Tensor:
    scores = net.scores(batch)
    if len(scores) not in net.cache:
        net.cache[len(scores)] = torch.arange(len(scores))
    return F.cross_entropy(scores[net.cache[len(scores)]], batch["y"])


@pytest.mark.parametrize(
    "step", [builds_a_table, registers_a_table, caches_by_rows], ids=lambda step: step.__name__
)
def test_masks_and_caches_are_still_built_in_micro_batches(step: Step) -> None:
    plain, ours = fit(step, None), fit(step, 3)
    assert ROWS[-3:] == [3, 3, 2]
    assert_alike(ours, plain)


def finds_the_best(net: Any, batch: dict[str, Tensor], index: int) -> Tensor:
    loss = net.loss(batch)
    net.best = min(net.best, loss.item())
    return loss


def finds_the_best_late(net: Any, batch: dict[str, Tensor], index: int) -> Tensor:
    loss = net.loss(batch)
    if index >= LATE:
        net.best = min(net.best, loss.item())
    return loss


def finds_a_temperature(net: Any, batch: dict[str, Tensor], index: int) -> Tensor:
    scores = net.scores(batch)
    if index == 3:
        net.kept = scores.detach().std().item()
    return F.cross_entropy(scores / (net.kept if index > 3 else 1), batch["y"])


def turns_by_the_loss(net: Any, batch: dict[str, Tensor], index: int) -> Tensor:
    loss = net.loss(batch)
    if loss.item() < 1.4:
        net.phase = "late"
    return loss


def keeps_the_first_loss_in_a_dict(net: Any, batch: dict[str, Tensor], index: int) -> Tensor:
    loss = net.loss(batch)
    return loss / net.cache.setdefault(0, loss.detach()) if index >= LATE else loss


def registers_an_anchor(net: Any, batch: dict[str, Tensor], index: int) -> Tensor:
    scores = net.scores(batch)
    if not hasattr(net, "anchor"):
        net.register_buffer("anchor", scores.detach().mean(0))
    return F.cross_entropy(scores - net.anchor * (index >= LATE), batch["y"])


REFUSED: dict[Step, str] = {
    registers_an_anchor: "anchor",
    finds_the_best: "best",
    finds_the_best_late: "best",
    finds_a_temperature: "kept",
    turns_by_the_loss: "phase",
    keeps_the_first_loss_in_a_dict: "cache",
}


@pytest.mark.parametrize("step", REFUSED, ids=lambda step: step.__name__)
def test_what_micro_batches_leave_otherwise_is_refused_by_name(step: Step) -> None:
    with pytest.raises(BudgetError, match=f"training_step changes .*{REFUSED[step]}"):
        fit(step, 3)
