"""The first rows of a batch, returned or kept for a logger: all rows of the few that trials compare."""

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_memkit import MemoryBudget
from lightning_memkit.micro_batching.sizes.sizing import BudgetError
from tests.plugins.toys import trainer, weights

ROWS = 32


class Net(LightningModule):
    """Returns or keeps `kept(scores)`."""

    def __init__(self, kept: Any, *, how: str, dropout: float = 0.0, since: int = 0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(dropout), nn.Tanh(), nn.Linear(8, 4))
        self.kept, self.how, self.since, self.seen = kept, how, since, list[Any]()
        self.examples: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self.net(batch[0])
        loss = F.cross_entropy(scores, batch[1])
        found = self.kept(scores.detach()) if batch_idx >= self.since else None
        if self.how == "returned":
            return {"loss": loss, **({} if found is None else {"examples": found})}
        self.examples = self.examples if found is None else found
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(outputs.get("examples") if self.how == "returned" else self.examples)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def fitted(net: Net, size: Any, **options: Any) -> tuple[Net, str]:
    torch.manual_seed(0)
    for parameter in net.parameters():
        nn.init.uniform_(parameter, -0.4, 0.4)
    x, y = torch.randn(4 * ROWS, 6), torch.randint(0, 4, (4 * ROWS,))
    callbacks = (
        [] if size is None else [MemoryBudget("1GiB", micro_batch_size=size, within="step", **options)]
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(*callbacks, max_epochs=1, max_steps=-1).fit(net, DataLoader(TensorDataset(x, y), ROWS))
    return net, " ".join(str(one.message) for one in caught)


FIRST: dict[str, Any] = {
    "4 rows": lambda scores: scores[:4],
    "16 rows": lambda scores: scores[:16],
    "every other row": lambda scores: scores[::2],
    "a list of 16": lambda scores: scores[:16].argmax(1).tolist(),
    "16 in a dictionary": lambda scores: {"scores": scores[:16], "of": "a batch"},
    "rows over the largest of 16": lambda scores: (
        scores / scores[:16].abs().max() if len(scores) > 8 else scores
    ),
}
ROWWISE: dict[str, Any] = {
    "all rows": lambda scores: scores,
    "their classes": lambda scores: scores.argmax(1),
    "a list": lambda scores: scores.argmax(1).tolist(),
    "a dictionary": lambda scores: {"scores": scores, "classes": scores.argmax(1)},
    "means of columns": lambda scores: scores.mean(0),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("name", FIRST)
def test_those_that_are_returned_are_named(name: str, size: int) -> None:
    _, said = fitted(Net(FIRST[name], how="returned"), size)
    assert "returns as 'examples' can't be made" in said


def test_they_are_named_in_a_later_batch() -> None:
    _, said = fitted(Net(FIRST["16 rows"], how="returned", since=3), 8)
    assert "returns as 'examples' can't be made" in said


@pytest.mark.parametrize("options", [{"weigh_by": "samples"}, {"effective_batch_size": 2 * ROWS}], ids=str)
def test_they_are_named_where_the_loss_of_a_batch_is_not_compared(options: dict[str, Any]) -> None:
    _, said = fitted(Net(FIRST["16 rows"], how="returned"), 8, **options)
    assert "returns as 'examples' can't be made" in said


def test_they_are_named_of_a_step_that_draws_random_numbers() -> None:
    _, said = fitted(Net(FIRST["16 rows"], how="returned", dropout=0.5), 8)
    assert "returns as 'examples' can't be made" in said


@pytest.mark.parametrize(
    ("how", "name"),
    [*(("returned", name) for name in ROWWISE), ("kept", "all rows"), ("kept", "means of columns")],
)
def test_one_entry_a_row_is_the_batch_s_without_a_word(how: str, name: str) -> None:
    whole, _ = fitted(Net(ROWWISE[name], how=how), None)
    split, said = fitted(Net(ROWWISE[name], how=how), 8)
    for ours, theirs in zip(split.seen, whole.seen, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert "micro-batches" not in said


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_those_that_are_kept_in_the_module_are_refused_by_name(dropout: float) -> None:
    with pytest.raises(BudgetError, match="training_step changes examples"):
        fitted(Net(FIRST["16 rows"], how="kept", dropout=dropout), 8)


def test_what_fits_runs_whole() -> None:
    whole, _ = fitted(Net(FIRST["16 rows"], how="kept"), None)
    free, _ = fitted(Net(FIRST["16 rows"], how="kept"), "auto")
    assert torch.equal(weights(free), weights(whole))
    for ours, theirs in zip(free.seen, whole.seen, strict=True):
        assert torch.equal(ours, theirs)


def test_a_user_who_says_how_to_split_is_warned() -> None:
    _, said = fitted(Net(FIRST["16 rows"], how="kept"), 8, weigh_by="samples")
    assert "training_step changes examples" in said
