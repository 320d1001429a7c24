"""Divisors that count some labels, by a step whose first batches have none of those that would tell which.

Until then the number of labels that are not zero predicts them as well.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_memkit import MemoryBudget
from lightning_memkit.micro_batching.sizes.sizing import BudgetError
from tests.plugins.toys import LossToy, trainer, weights

BATCHES = [[0, 3, 3, 3], [0, 2, 2, 3], [2, 0, 0, 0], [2, 2, 3, 3], [1, 0, 3, 0], [3, 3, 0, 1], [1, 1, 0, 2]]


class Rows(LossToy):
    def __init__(self, loss: Callable[["Rows", Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.loss = nn.Linear(6, 4), loss


def of_all_rows(toy: Rows, out: Tensor, labels: Tensor) -> Tensor:
    """Over the positive rows, of which each batch has one or more."""
    each = F.cross_entropy(out, labels.long(), reduction="none")
    return each.sum() / (labels > 1).sum().clamp(min=1)


def of_positive_rows(toy: Rows, out: Tensor, labels: Tensor) -> Tensor:
    positive = labels > 1
    return (out.square().mean(1) * positive).sum() / positive.sum().clamp(min=1)


def clamped_at_two(toy: Rows, out: Tensor, labels: Tensor) -> Tensor:
    return out.square().sum() / (labels > 1).sum().clamp(min=2)


def of_weights(toy: Rows, out: Tensor, labels: Tensor) -> Tensor:
    """Over the rows of some weight; labels are thirds of it."""
    return out.square().sum() / (labels / 3 > 0.5).sum().clamp(min=1) + 0.1 * out.mean()


LOSSES = {
    "all rows": of_all_rows,
    "positive rows": of_positive_rows,
    "at two": clamped_at_two,
    "weights": of_weights,
}


def fitted(
    loss: Callable[[Rows, Tensor, Tensor], Tensor],
    size: int | None,
    dtype: torch.dtype,
    batches: list[list[int]] = BATCHES,
) -> Tensor:
    torch.manual_seed(0)
    toy, rows = Rows(loss).double(), len(batches[0])
    data = TensorDataset(
        torch.randn(len(batches) * rows, 6).double(), torch.tensor(batches).flatten().to(dtype)
    )
    budget = [] if size is None else [MemoryBudget("1GiB", micro_batch_size=size, within="step")]
    trainer(*budget, max_epochs=2, max_steps=-1).fit(toy, DataLoader(data, rows))
    return weights(toy)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float64], ids=["int", "float"])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.long
def test_a_number_that_was_right_by_chance_is_looked_up(
    loss: Callable[[Rows, Tensor, Tensor], Tensor], size: int, dtype: torch.dtype
) -> None:
    ours, plain = fitted(loss, size, dtype), fitted(loss, None, dtype)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-13)


# Whatever a step counts, it is kept from less than 3 in the first of these epochs' batches.
FEW = [[0, 2, 0, 1], [2, 2, 0, 0], [0, 0, 0, 1], [1, 0, 2, 2], [0, 1, 1, 0]]
MORE = [[2, 2, 2, 2], [2, 1, 2, 1], [2, 2, 2, 0], [0, 1, 2, 2]]


def over(count: Callable[[Tensor], Tensor]) -> Callable[[Rows, Tensor, Tensor], Tensor]:
    """All rows, over what is counted."""
    return lambda toy, out, labels: out.square().sum() / count(labels).clamp(min=3)


LATE = {
    "of a class": over(lambda labels: (labels == 2).sum()),
    "of two classes": over(lambda labels: (labels > 0).sum()),
    "sum": over(lambda labels: labels.sum() / 2),
    "mean": lambda toy, out, labels: out.square().mean() / (labels == 2).double().mean().clamp(min=0.75),
    "in Python": lambda toy, out, labels: out.square().sum() / max(int((labels == 2).sum()), 3),
    "multiplied": lambda toy, out, labels: out.square().sum() * (1 / max(int((labels == 2).sum()), 3)),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("loss", LATE.values(), ids=LATE)
@pytest.mark.long
def test_a_divisor_that_was_clamped_in_all_batches_before_is_looked_up_where_there_is_more_to_count(
    loss: Callable[[Rows, Tensor, Tensor], Tensor], size: int
) -> None:
    """It was taken for a constant after twelve batches, unsaid: the weights were off by 0.4 %."""
    batches = FEW * 4 + MORE
    ours, plain = (fitted(loss, one, torch.int64, batches) for one in (size, None))
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-13)


# Each micro-batch of four counts one label or more; in the last batches more than six.
CAPPED = {
    "mean": lambda toy, out, labels: (out.square().mean(1) * labels).sum() / labels.sum().clamp(max=6),
    "in Python": lambda toy, out, labels: (out.square().mean(1) * labels).sum() / min(int(labels.sum()), 6),
    "beside a mean": lambda toy, out, labels: (
        out.square().mean() + (out.square().mean(1) * labels).sum() / labels.sum().clamp(max=6)
    ),
}
UP_TO_SIX = [[1, 0, 1, 0, 1, 1, 0, 0], [1, 1, 0, 1, 0, 0, 1, 0], [0, 1, 1, 1, 1, 0, 1, 1]]
SEVEN = [[1, 1, 0, 1, 1, 1, 1, 1]]


@pytest.mark.parametrize("loss", CAPPED.values(), ids=CAPPED)
@pytest.mark.long
def test_a_divisor_that_is_capped_where_there_is_more_to_count_is_refused_there(
    loss: Callable[[Rows, Tensor, Tensor], Tensor],
) -> None:
    """Up to the 32nd batch, which is compared in any case, micro-batches were weighed by too much, unsaid."""
    fine, more = UP_TO_SIX * 6, UP_TO_SIX * 6 + SEVEN
    ours, plain = (fitted(loss, one, torch.int64, fine) for one in (4, None))
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-13)
    with pytest.raises(BudgetError, match="miss the whole batch's"):
        fitted(loss, 4, torch.int64, more)


def hardest_twelve(toy: Rows, out: Tensor, labels: Tensor) -> Tensor:
    return out.square().mean(1).topk(min(12, len(out))).values.mean()


@pytest.mark.parametrize("size", [4, 8])
def test_a_batch_of_more_rows_than_any_before_is_compared(size: int) -> None:
    """Rows are chosen among 16 and not among 8; a size of the first batch's rows went on to split larger ones."""

    def fit(rows: list[int], *budget: MemoryBudget) -> Tensor:
        torch.manual_seed(0)
        toy = Rows(hardest_twelve).double()
        batches = [(torch.randn(n, 6).double(), torch.zeros(n, dtype=torch.int64)) for n in rows]
        trainer(*budget, max_epochs=1, max_steps=-1).fit(toy, DataLoader(batches, batch_size=None))  # pyright: ignore
        return weights(toy)

    fine = [8] * 18
    ours, plain = fit(fine, MemoryBudget("1GiB", micro_batch_size=size, within="step")), fit(fine)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-13)
    with pytest.raises(BudgetError, match="act on each other"):
        fit([*fine, 16], MemoryBudget("1GiB", micro_batch_size=size, within="step"))
    whole = fit([*fine, 16], MemoryBudget("1GiB"))
    torch.testing.assert_close(whole, fit([*fine, 16]), rtol=1e-12, atol=1e-13)


def hardest_negatives(each: Tensor, positive: Tensor) -> tuple[Tensor, int]:
    """The losses of the negatives, and how many of them count: three for each positive row, and three at least."""
    negatives = each[~positive]
    return negatives, min(3 * max(int(positive.sum()), 1), len(negatives))


def mined(toy: Rows, out: Tensor, labels: Tensor) -> Tensor:
    each, positive = out.square().mean(1), labels > 0
    negatives, kept = hardest_negatives(each, positive)
    return (each[positive].sum() + negatives.topk(kept).values.sum()) / positive.sum().clamp(min=1)


def mined_by_index(toy: Rows, out: Tensor, labels: Tensor) -> Tensor:
    each, positive = out.square().mean(1), labels > 0
    negatives, kept = hardest_negatives(each, positive)
    chosen = negatives[negatives.argsort(descending=True)[:kept]]
    return (each[positive].sum() + chosen.sum()) / positive.sum().clamp(min=1)


def mined_by_slice(toy: Rows, out: Tensor, labels: Tensor) -> Tensor:
    each, positive = out.square().mean(1), labels > 0
    negatives, kept = hardest_negatives(each, positive)
    chosen = negatives.sort(descending=True).values[:kept]
    return torch.cat([each[positive], chosen]).mean()


def rows_of(batches: list[list[int]]) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return [(torch.randn(len(labels), 6).double(), torch.tensor(labels)) for labels in batches]


def fitted_to(
    loss: Callable[[Rows, Tensor, Tensor], Tensor], batches: list[list[int]], size: int | None
) -> Tensor:
    data = rows_of(batches)
    toy = Rows(loss).double()
    budget = [] if size is None else [MemoryBudget("1GiB", micro_batch_size=size, within="step")]
    trainer(*budget, max_epochs=1, max_steps=-1).fit(toy, DataLoader(data, batch_size=None))  # pyright: ignore
    return weights(toy)


# All negatives of each micro-batch count, and of any other rows of the first batches, of which three are negative.
# The last batch has as many of each kind as the one before; of its third micro-batch, three of four count.
ALL_NEGATIVES = [[1, 1, 0, 1, 1, 0, 1, 0]] * 18 + [[1, 0, 0, 1] * 4]
SOME = [[1, 1, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1]]


@pytest.mark.parametrize("loss", [mined, mined_by_index, mined_by_slice])
@pytest.mark.long
def test_a_choice_that_begins_in_a_later_micro_batch_is_compared(
    loss: Callable[[Rows, Tensor, Tensor], Tensor],
) -> None:
    """All negatives counted in each micro-batch before, and the functions that chose them were there: unsaid."""
    ours, plain = (fitted_to(loss, ALL_NEGATIVES, size) for size in (4, None))
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-13)
    with pytest.raises(BudgetError, match="miss the whole batch's"):
        fitted_to(loss, ALL_NEGATIVES + SOME, 4)


def spread_of_many(toy: Rows, out: Tensor, labels: Tensor) -> Tensor:
    """A term that begins with the seventh positive row, which no micro-batch of four has."""
    each = out.square().mean(1)
    loss, positive = each.mean(), each[labels > 0]
    return loss + 0.3 * (positive.max() - positive.min()) if len(positive) > 6 else loss


def test_a_term_that_begins_with_more_rows_is_named_as_such() -> None:
    """It was said that training_step returns None, which it never does."""
    with pytest.raises(BudgetError, match="the whole batch's loss has terms or divisors"):
        fitted_to(spread_of_many, [[1, 0] * 4] * 8 + [[1] * 8 + [0] * 8], 4)
