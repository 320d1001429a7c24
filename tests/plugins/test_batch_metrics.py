"""Metric objects that a step calls and logs on_step, in batches that are split: the values are the plain run's."""

from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_memkit import MemoryBudget
from tests.plugins.toys import trainer
from tests.processes import run_on_ranks

CLASSES = 4


class Own(torchmetrics.Metric):
    """Needs all states in each call, and changes them in place."""

    full_state_update = True
    sums: Any
    rows: Any

    def __init__(self) -> None:
        super().__init__()
        self.add_state("sums", torch.zeros(2, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("rows", [], dist_reduce_fx="cat")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        self.sums += torch.stack([logits.square().sum(), torch.tensor(len(labels), dtype=torch.float64)])
        self.rows.append(labels)

    def compute(self) -> Tensor:
        rows = torch.cat(self.rows) if isinstance(self.rows, list) else self.rows
        return (self.sums[0] / self.sums[1]).sqrt() + rows.double().var(correction=0)


METRICS: dict[str, Any] = {
    "micro": lambda: MulticlassAccuracy(CLASSES, average="micro"),
    "macro": lambda: MulticlassAccuracy(CLASSES),
    "f1": lambda: MulticlassF1Score(CLASSES),
    "own": Own,
    "collection": lambda: torchmetrics.MetricCollection(
        {"a": MulticlassAccuracy(CLASSES), "f": MulticlassF1Score(CLASSES)}
    ),
    "sum": lambda: MulticlassAccuracy(CLASSES) + MulticlassF1Score(CLASSES),
}


class Classifier(LightningModule):
    """Keeps what the callback metrics say after each batch, outside of the module."""

    seen: list[dict[str, Tensor]]

    def __init__(self, metric: Any, seen: list[dict[str, Tensor]], calls: int = 1) -> None:
        super().__init__()
        self.net = nn.Linear(6, CLASSES, dtype=torch.float64)
        self.metric: Any = metric
        self.calls = calls
        object.__setattr__(self, "seen", seen)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        logits = self.net(batch[0])
        for call in range(self.calls):
            self.metric(logits.detach() * (-1) ** (call + self.calls - 1), batch[1])
        if isinstance(self.metric, torchmetrics.MetricCollection):
            self.log_dict(self.metric, on_step=True, on_epoch=True)
        else:
            self.log("metric", self.metric, on_step=True, on_epoch=True)
        return F.cross_entropy(logits, batch[1])

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(dict(self.trainer.callback_metrics))

    def on_train_epoch_end(self) -> None:
        self.seen.append(dict(self.trainer.callback_metrics))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3)


def fit(metric: Any, size: Any, calls: int = 1) -> tuple[list[dict[str, Tensor]], Classifier]:
    torch.manual_seed(0)
    seen: list[dict[str, Tensor]] = []
    module = Classifier(metric(), seen, calls)
    generator = torch.Generator().manual_seed(3)
    data: Any = [
        (torch.randn(n, 6, generator=generator, dtype=torch.float64), torch.arange(n) * 3 % CLASSES)
        for n in (8, 8, 5, 8, 3, 8)
    ]
    callbacks = [] if size is None else [MemoryBudget("1GiB", micro_batch_size=size, within="step")]
    trainer(*callbacks, max_epochs=2, max_steps=-1).fit(module, DataLoader(data, batch_size=None))
    return seen, module


@pytest.mark.sampled(6)
@pytest.mark.filterwarnings("ignore:Metric `Own` will save all targets")
@pytest.mark.parametrize("size", [1, 3, "auto"])
@pytest.mark.parametrize("name", METRICS)
def test_a_batch_shows_the_value_of_all_its_rows(name: str, size: Any) -> None:
    """It showed that of its last micro-batch, without a word."""
    plain, _ = fit(METRICS[name], None)
    split, module = fit(METRICS[name], size)
    assert len(split) == len(plain) == 14
    for index, (ours, theirs) in enumerate(zip(split, plain, strict=True)):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            torch.testing.assert_close(
                ours[key], value, msg=f"{key} after batch {index}", rtol=1e-6, atol=1e-7
            )
    assert not any(one._forward_hooks for one in module.modules())


def test_of_several_calls_in_a_step_the_last_one_shows() -> None:
    plain, _ = fit(METRICS["macro"], None, calls=2)
    split, _ = fit(METRICS["macro"], 3, calls=2)
    for ours, theirs in zip(split, plain, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_copy_shares_what_is_no_state() -> None:
    """A metric may hold a network: a copy of that would cost its memory."""
    from lightning_memkit.micro_batching.parts.batch_metrics import _without_states

    metric: Any = Own()
    metric.network = nn.Linear(3, 3)
    metric.update(torch.ones(2, CLASSES), torch.tensor([0, 1]))
    made = _without_states(metric)
    assert made.network is metric.network
    made.reset()
    made.update(torch.ones(2, CLASSES), torch.tensor([2, 3]))
    assert len(metric.rows) == len(made.rows) == 1
    assert metric.sums[1] == made.sums[1] == 2
    assert metric.rows[0].tolist() == [0, 1]


def test_each_rank_shows_the_value_of_its_own_batch() -> None:
    done = run_on_ranks("tests.plugins.batch_metrics_ranks")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("equal") == 2
