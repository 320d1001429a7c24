"""A loss that becomes another one after the batches it was proven on: whole, or refused before a step is wrong.

The first four batches are benign: no padding, no missing label, all weights alike. What comes later makes rows act on
each other, or takes a mean over something else. Then the same for steps that change by themselves.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

from lightning_memkit import MemoryBudget
from lightning_memkit.micro_batching.sizes.sizing import BudgetError
from tests.plugins.toys import trainer

BENIGN, ROWS = 4, (8, 8, 8, 8, 8, 8, 5)
Batch = dict[str, Tensor]


class Net(LightningModule):
    """A small classifier whose loss is given; `ids` have an embedding."""

    def __init__(self, loss: Callable[["Net", Batch], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.ids = nn.Embedding(300, 6, scale_grad_by_freq=loss is by_frequency)
        self.double()
        self._loss = loss

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self._loss(self, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Data(IterableDataset[Batch]):
    """Batches that get what `later` adds from the fifth on."""

    def __init__(self, later: Callable[[Batch, torch.Generator], None], rows: tuple[int, ...]) -> None:
        self._later, self._rows = later, rows

    def __iter__(self) -> Iterator[Batch]:
        for index, rows in enumerate(self._rows):
            generator = torch.Generator().manual_seed(1000 + index)
            batch = {
                "x": torch.randn(rows, 6, generator=generator, dtype=torch.float64),
                "y": torch.randint(0, 4, (rows,), generator=generator),
                "id": torch.randint(0, 300, (rows,), generator=generator),
                "targets": torch.randn(rows, 3, generator=generator, dtype=torch.float64),
                "w": torch.ones(rows, dtype=torch.float64),
                "length": torch.full((rows,), 3),
                "positive": torch.zeros(rows, dtype=torch.float64),
                "tokens": torch.randint(0, 200, (rows, 20), generator=generator),
            }
            if index >= BENIGN:
                self._later(batch, generator)
            yield batch


class Weights(Callback):
    def __init__(self) -> None:
        self.after: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, *_: Any) -> None:
        self.after.append(torch.cat([one.detach().flatten() for one in pl_module.parameters()]).clone())


def nothing(batch: Batch, generator: torch.Generator) -> None:
    """The batches stay as they are."""


def fitted(
    loss: Callable[[Net, Batch], Tensor],
    later: Callable[[Batch, torch.Generator], None] = nothing,
    size: int | str | None = None,
    rows: tuple[int, ...] = ROWS,
) -> tuple[list[Tensor], Exception | None]:
    """The weights after each step, and the error that ended the run."""
    seen = Weights()
    budget = [] if size is None else [MemoryBudget("1GiB", micro_batch_size=size, within="step")]  # pyright: ignore[reportArgumentType]
    error = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trainer(*budget, seen).fit(Net(loss), DataLoader(Data(later, rows), batch_size=None))
        except BudgetError as refused:
            error = refused
    return seen.after, error


def assert_never_wrong(
    loss: Callable[[Net, Batch], Tensor],
    later: Callable[[Batch, torch.Generator], None] = nothing,
    rows: tuple[int, ...] = ROWS,
) -> None:
    """Each size refuses, or runs whole; up to a refusal weights are those of whole batches."""
    plain, _ = fitted(loss, later, rows=rows)
    for size in (1, 3, "auto"):
        ours, error = fitted(loss, later, size, rows)
        assert len(ours) == len(plain) or error is not None
        for mine, theirs in zip(ours, plain, strict=False):
            assert (mine - theirs).norm() <= 1e-12 * theirs.norm(), f"size {size}"
        assert error is not None or size == "auto"


def weights_over_the_largest(module: Net, batch: Batch) -> Tensor:
    """Importance weights of a prioritized replay."""
    errors = (module.net(batch["x"]).sum(1) - batch["targets"][:, 0]).square()
    return (batch["w"] / batch["w"].max() * errors).mean()


def balanced_by_the_batch(module: Net, batch: Batch) -> Tensor:
    """Positives weigh what negatives outnumber them."""
    count = batch["positive"].sum()
    weight = (len(batch["positive"]) - count) / count if count > 0 else torch.ones_like(count)
    logits = module.net(batch["x"])[:, 0]
    return functional.binary_cross_entropy_with_logits(logits, batch["positive"], pos_weight=weight)


def cut_to_the_longest(module: Net, batch: Batch) -> Tensor:
    """A mean over rows times the longest row, padding included."""
    longest = int(batch["length"].max())
    logits = module.net(batch["x"])[:, None].expand(-1, longest, -1)
    logits = logits * torch.arange(1, longest + 1, dtype=torch.float64)[:, None]
    return functional.cross_entropy(logits.flatten(0, 1), batch["y"].repeat_interleave(longest))


def tasks_with_labels(module: Net, batch: Batch) -> Tensor:
    """The sum over tasks of means over the rows that have a label of it."""
    present = (~batch["targets"].isnan()).double()
    errors = (module.net(batch["x"])[:, :3] - batch["targets"].nan_to_num()).square() * present
    return (errors.sum(0) / present.sum(0).clamp(min=1)).mean()


class MaskedMean(torch.autograd.Function):
    """A fused kernel: it shows nothing of what it divides by."""

    @staticmethod
    def forward(ctx: Any, losses: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        return (losses * mask).sum() / mask.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return grads[0] * mask / mask.sum(), None


def fused_over_a_mask(module: Net, batch: Batch) -> Tensor:
    losses = functional.cross_entropy(module.net(batch["x"]), batch["y"], reduction="none")
    return MaskedMean.apply(losses, batch["w"])  # pyright: ignore[reportReturnType]


def fused_over_tokens(module: Net, batch: Batch) -> Tensor:
    losses = module.net(batch["x"]).sum(1, keepdim=True) * (batch["tokens"] % 7)
    return MaskedMean.apply(losses.square(), (batch["tokens"] != -100).double())  # pyright: ignore[reportReturnType]


def ragged_weights(batch: Batch, generator: torch.Generator) -> None:
    batch["w"] = torch.rand(len(batch["w"]), generator=generator, dtype=torch.float64) + 0.1


def masked(batch: Batch, generator: torch.Generator) -> None:
    batch["w"] = (torch.rand(len(batch["w"]), generator=generator) < 0.6).double()
    batch["w"][0] = 1


def with_positives(batch: Batch, generator: torch.Generator) -> None:
    batch["positive"] = (torch.rand(len(batch["positive"]), generator=generator) < 0.4).double()


def of_many_lengths(batch: Batch, generator: torch.Generator) -> None:
    batch["length"] = torch.randint(1, 7, (len(batch["length"]),), generator=generator)


def with_missing_labels(batch: Batch, generator: torch.Generator) -> None:
    batch["targets"][torch.rand(batch["targets"].shape, generator=generator) < 0.5] = torch.nan


def padded(batch: Batch, generator: torch.Generator) -> None:
    lengths = torch.randint(1, 20, (len(batch["tokens"]), 1), generator=generator)
    batch["tokens"][torch.arange(20) >= lengths] = -100


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("loss", "later"),
    [
        (weights_over_the_largest, ragged_weights),
        (balanced_by_the_batch, with_positives),
        (cut_to_the_longest, of_many_lengths),
        (fused_over_a_mask, masked),
        (fused_over_tokens, padded),
    ],
)
@pytest.mark.long
def test_data_that_makes_a_loss_another_one(
    loss: Callable[[Net, Batch], Tensor], later: Callable[[Batch, torch.Generator], None]
) -> None:
    assert_never_wrong(loss, later)


@pytest.mark.long
def test_tasks_with_missing_labels_are_split_all_the_same() -> None:
    plain, _ = fitted(tasks_with_labels, with_missing_labels)
    for size in (1, 3, "auto"):
        ours, error = fitted(tasks_with_labels, with_missing_labels, size)
        assert error is None
        for mine, theirs in zip(ours, plain, strict=True):
            assert (mine - theirs).norm() <= 1e-12 * theirs.norm(), f"size {size}"


def hard_examples(module: Net, batch: Batch) -> Tensor:
    losses = functional.cross_entropy(module.net(batch["x"]), batch["y"], reduction="none")
    return losses.topk(max(1, len(losses) // 2)).values.mean()


def centered(module: Net, batch: Batch) -> Tensor:
    logits = module.net(batch["x"])
    return functional.cross_entropy(logits - 0.5 * logits.mean(0), batch["y"])


def weighed_by_counts(module: Net, batch: Batch) -> Tensor:
    weight = 1 / torch.bincount(batch["y"], minlength=4).clamp(min=1).double().sqrt()
    return functional.cross_entropy(module.net(batch["x"]), batch["y"], weight=weight)


def plain(module: Net, batch: Batch) -> Tensor:
    return functional.cross_entropy(module.net(batch["x"]), batch["y"])


def plainly_weighed(module: Net, batch: Batch) -> Tensor:
    return functional.cross_entropy(module.net(batch["x"]), batch["y"], weight=torch.ones(4).double())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("first", "then"),
    [
        (plain, hard_examples),
        (plain, centered),
        (plain, weighed_by_counts),
        (plainly_weighed, weighed_by_counts),
    ],
)
@pytest.mark.long
def test_a_step_that_changes_in_the_middle_of_a_run(
    first: Callable[[Net, Batch], Tensor], then: Callable[[Net, Batch], Tensor]
) -> None:
    assert_never_wrong(lambda module, batch: (first if module.global_step < BENIGN else then)(module, batch))


def by_frequency(module: Net, batch: Batch) -> Tensor:
    """The embedding divides a row's gradient by how often its id is in the batch."""
    return functional.cross_entropy(module.net(batch["x"] + module.ids(batch["id"])), batch["y"])


def unique_users(module: Net, batch: Batch) -> Tensor:
    """A penalty on the embeddings of the batch's users, each once."""
    losses = functional.cross_entropy(module.net(batch["x"]), batch["y"], reduction="sum")
    return (losses + 0.1 * module.ids(batch["id"].unique()).square().sum()) / 32


def mean_over_users(module: Net, batch: Batch) -> Tensor:
    losses = functional.cross_entropy(module.net(batch["x"]), batch["y"], reduction="none")
    users, place, count = batch["id"].unique(return_inverse=True, return_counts=True)
    return (losses.new_zeros(len(users)).index_add(0, place, losses) / count).mean()


@pytest.mark.parametrize("loss", [by_frequency, unique_users, mean_over_users])
@pytest.mark.long
def test_rows_with_one_id_among_many(loss: Callable[[Net, Batch], Tensor]) -> None:
    """Of 300 ids, 32 rows share some: five rows that are chosen at random hardly do."""
    assert_never_wrong(loss, rows=(32, 32, 32))


def test_the_traps_spring_without_a_budget() -> None:
    """Each of these losses is another one in parts of a batch."""
    batch = list(Data(nothing, (32,)))[0]
    for later in (ragged_weights, with_positives, of_many_lengths, padded):
        later(batch, torch.Generator().manual_seed(0))
    batch["length"][:5] = 2
    parts = [{name: tensor[rows] for name, tensor in batch.items()} for rows in (slice(5), slice(5, 32))]
    for loss in (
        weights_over_the_largest, balanced_by_the_batch, cut_to_the_longest, fused_over_a_mask, fused_over_tokens,
        hard_examples, centered, weighed_by_counts, unique_users, mean_over_users, tasks_with_labels,
    ):  # fmt: skip
        if loss is tasks_with_labels:
            with_missing_labels(batch, torch.Generator().manual_seed(0))  # the parts are views of it
        whole = loss(Net(loss), batch)
        split = sum((len(part["x"]) / 32 * loss(Net(loss), part) for part in parts), start=torch.zeros(()))
        assert (whole - split).abs() > 1e-6 * whole.abs(), loss


def two_means_of_one_view(module: Net, batch: Batch) -> Tensor:
    """A masked mean over tokens beside a mean over all of them, of losses that were viewed as rows and columns."""
    tokens = batch["tokens"][:, :5] % 4
    logits = module.net(batch["x"])[:, None] * torch.arange(1, 6, dtype=torch.float64)[:, None]
    losses = functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none").view(-1, 5)
    mask = (batch["tokens"][:, 5:10] % 3 > 0).double()
    return (losses * mask).sum() / mask.sum() + losses.mean()


def two_masks_of_one_view(module: Net, batch: Batch) -> Tensor:
    tokens = batch["tokens"][:, :5] % 4
    logits = module.net(batch["x"])[:, None] * torch.arange(1, 6, dtype=torch.float64)[:, None]
    losses = functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none").view(-1, 5)
    mask, other = (batch["tokens"][:, 5:10] % 3 > 0).double(), (batch["tokens"][:, 10:15] % 2).double()
    by_row = (losses * mask).sum(1) / mask.sum(1).clamp(min=1)
    return (losses * other).sum() / other.sum() + by_row.mean()


@pytest.mark.parametrize("loss", [two_means_of_one_view, two_masks_of_one_view])
@pytest.mark.long
def test_two_reductions_of_one_view_are_split_exactly(loss: Callable[[Net, Batch], Tensor]) -> None:
    """Each has its own divisor, though autograd shows one node for the view that both reduce."""
    plain_weights, _ = fitted(loss)
    for size in (1, 3):
        ours, error = fitted(loss, size=size)
        assert error is None
        for mine, theirs in zip(ours, plain_weights, strict=True):
            assert (mine - theirs).norm() <= 1e-12 * theirs.norm()


def one_draw_for_all(module: Net, batch: Batch) -> Tensor:
    """Trained at several scales: one is drawn for the whole batch."""
    scale = torch.randint(1, 10, (1,)).double()
    return functional.cross_entropy(module.net(batch["x"] / scale), batch["y"])


def mixed_up(module: Net, batch: Batch) -> Tensor:
    weight = torch.distributions.Beta(1.0, 1.0).sample().double()
    logits = module.net(batch["x"])
    first, second = (
        functional.cross_entropy(logits, batch["y"]),
        functional.cross_entropy(logits, 3 - batch["y"]),
    )
    return weight * first + (1 - weight) * second


@pytest.mark.parametrize("loss", [one_draw_for_all, mixed_up])
@pytest.mark.long
def test_a_number_that_is_drawn_for_the_whole_batch_is_drawn_once(
    loss: Callable[[Net, Batch], Tensor],
) -> None:
    """Micro-batches would draw one each: the batch runs whole."""
    torch.manual_seed(3)
    plain_weights, _ = fitted(loss)
    for size in (1, 3, "auto"):
        torch.manual_seed(3)
        ours, error = fitted(loss, size=size)
        assert error is None
        for mine, theirs in zip(ours, plain_weights, strict=True):
            assert (mine - theirs).norm() <= 1e-12 * theirs.norm()


def test_dropout_draws_for_rows_and_is_split() -> None:
    def dropped(module: Net, batch: Batch) -> Tensor:
        hidden = functional.dropout(module.net[0](batch["x"]), 0.3)
        return functional.cross_entropy(module.net[2](hidden), batch["y"])

    seen = MemoryBudget("1GiB", micro_batch_size=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(seen).fit(Net(dropped), DataLoader(Data(nothing, ROWS), batch_size=None))
    assert [change[1] for change in seen.history] == [3]
