"""Losses divided by a count that is kept from zero, and not zero where none is counted: detectors' normalisation."""

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_memkit import MemoryBudget
from lightning_memkit.micro_batching.shares.batch_counts import BatchCount, Foretelling, Shown
from lightning_memkit.micro_batching.shares.lone_counts import WHOLE, LoneCounts, saving_shapes_only
from lightning_memkit.micro_batching.sizes.sizing import BudgetError

ROWS, BATCHES, CLASSES = 8, 10, 5
Loss = Callable[["Detector", Tensor, Tensor], Tensor]


def of_rows(module: "Detector", x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module.net(x), y, reduction="none")


def focal(module: "Detector", x: Tensor, y: Tensor) -> Tensor:
    """Lin et al. 2017: the background's rows count in the sum, and not in what divides it."""
    loss = of_rows(module, x, y)
    return ((1 - torch.exp(-loss)) ** 2 * loss).sum() / (y > 2).sum().clamp(min=1)


def by_python(module: "Detector", x: Tensor, y: Tensor) -> Tensor:
    return of_rows(module, x, y).sum() / max(int((y > 2).sum()), 1)


def beside_boxes(module: "Detector", x: Tensor, y: Tensor) -> Tensor:
    """Boxes have a loss where there is an object only."""
    positive = y > 2
    boxes = F.smooth_l1_loss(module.boxes(x[positive]), x[positive, :4], reduction="sum")
    return focal(module, x, y) + boxes / positive.sum().clamp(min=1)


def masked(module: "Detector", x: Tensor, y: Tensor) -> Tensor:
    """What is not counted is not summed: its divisor of 1 is a count, or divides nothing."""
    return of_rows(module, x, y)[y > 2].sum() / (y > 2).sum().clamp(min=1)


def by_its_inverse(module: "Detector", x: Tensor, y: Tensor) -> Tensor:
    return of_rows(module, x, y).sum() * (1.0 / max(int((y > 2).sum()), 1))


def margins(module: "Detector", x: Tensor, y: Tensor) -> Tensor:
    """A row beyond its margin has no loss, and counts."""
    return F.relu(0.2 - module.boxes(x)[:, 0] * (2 * (y > 2) - 1))


def hinge(module: "Detector", x: Tensor, y: Tensor) -> Tensor:
    return margins(module, x, y).sum() / len(y)


def masked_hinge(module: "Detector", x: Tensor, y: Tensor) -> Tensor:
    return margins(module, x, y)[y > 1].sum() / (y > 1).sum().clamp(min=1)


def two_by_row(module: "Detector", x: Tensor, y: Tensor) -> Tensor:
    """Added row by row before they are summed: a single row's are no two terms."""
    return (of_rows(module, x, y) + module.boxes(x).square().sum(1)).sum() / (y > 2).sum().clamp(min=1)


def by_the_root(module: "Detector", x: Tensor, y: Tensor) -> Tensor:
    return of_rows(module, x, y).sum() / (y > 2).sum().clamp(min=1).double().sqrt()


def normalized_weights(module: "Detector", x: Tensor, y: Tensor) -> Tensor:
    """The divisor shows where autograd saves it, below the rows' weights."""
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5], dtype=torch.float64)[y]
    return (of_rows(module, x, y) * weights / weights.sum()).sum()


def kept_from(least: float, gain: float = 1.0) -> Loss:
    """Divided by no less than another number than 1; a gain hides it."""

    def loss(module: "Detector", x: Tensor, y: Tensor) -> Tensor:
        return gain * of_rows(module, x, y).sum() / (y > 2).sum().clamp(min=least)

    return loss


def by_python_from_2(module: "Detector", x: Tensor, y: Tensor) -> Tensor:
    return of_rows(module, x, y).sum() * (0.1 / max(int((y > 2).sum()), 2))


def penalized(module: "Detector", x: Tensor, y: Tensor) -> Tensor:
    """A gradient penalty: it differentiates within the step."""
    x = x.detach().requires_grad_()
    slope = torch.autograd.grad(module.boxes(x).square().sum(), x, create_graph=True)[0]
    return (slope.square().sum(1) + of_rows(module, x, y)).sum() / (y > 2).sum().clamp(min=1)


def mined(module: "Detector", x: Tensor, y: Tensor) -> Tensor:
    """The hardest negatives of the batch, three for a positive: rows act on each other, which no single row shows."""
    loss, positive = of_rows(module, x, y), y > 2
    negatives = min(3 * int(positive.sum()), int((~positive).sum()))
    return (loss[positive].sum() + loss[~positive].topk(negatives).values.sum()) / max(int(positive.sum()), 1)


class Detector(LightningModule):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss = loss
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, CLASSES))
        self.boxes = nn.Linear(6, 4)
        self.reported: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self, *batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.reported.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def trained(
    loss: Loss,
    seed: int,
    size: int | None,
    rows: int = ROWS,
    accumulated: int = 1,
    *,
    shows_warnings: bool = False,
    **options: Any,
) -> tuple[Tensor, list[float], set[int]]:
    torch.manual_seed(seed)
    module = Detector(loss).double()
    x = torch.randn(ROWS * BATCHES, 6, dtype=torch.float64)
    y = torch.randint(0, CLASSES, (ROWS * BATCHES,))
    budget = [] if size is None else [MemoryBudget("1GiB", micro_batch_size=size, within="step", **options)]
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=list(budget),
        accumulate_grad_batches=accumulated,
    )  # fmt: skip
    with warnings.catch_warnings():
        if not shows_warnings:
            warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader(TensorDataset(x, y), batch_size=rows))
    weights = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    sizes = {change.micro_batch_size for one in budget for change in one.history}
    return weights, module.reported, sizes


@pytest.mark.sampled(25)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "loss",
    [
        focal,
        by_python,
        beside_boxes,
        by_its_inverse,
        masked,
        hinge,
        masked_hinge,
        mined,
        penalized,
        kept_from(2),
        kept_from(0.5, gain=0.1),
        by_python_from_2,
    ],
)
@pytest.mark.long
def test_it_is_the_batch_s_or_refused(loss: Loss, seed: int, size: int) -> None:
    """The sum of the micro-batches' divisors was taken for the total, unsaid."""
    weights, reported, _ = trained(loss, seed, None)
    try:
        ours, told, sizes = trained(loss, seed, size)
    except BudgetError:
        assert loss is mined
        return
    assert loss is not mined
    assert sizes == {size}
    torch.testing.assert_close(ours, weights, rtol=0, atol=1e-12)
    assert told == pytest.approx(reported, abs=1e-12)


@pytest.mark.parametrize("loss", [hinge, masked])
def test_batches_that_are_accumulated_have_totals_of_their_own(loss: Loss) -> None:
    weights, _, _ = trained(loss, 0, None, accumulated=2)
    ours, _, sizes = trained(loss, 0, 1, accumulated=2)
    assert sizes == {1}
    torch.testing.assert_close(ours, weights, rtol=0, atol=1e-12)


@pytest.mark.parametrize("loss", [hinge, masked])
def test_batches_that_are_weighed_as_one_are_looked_up_one_by_one(loss: Loss) -> None:
    weights, _, _ = trained(loss, 0, None, rows=2 * ROWS)
    ours, _, sizes = trained(loss, 0, 1, effective_batch_size=2 * ROWS)
    assert sizes == {1}
    torch.testing.assert_close(ours, weights, rtol=0, atol=1e-12)


def seldom(module: "Detector", x: Tensor, y: Tensor) -> Tensor:
    """No row of some batches counts; nothing that the batch holds tells so."""
    counted = x[:, 0] > 1
    return of_rows(module, x, y)[counted].sum() / counted.sum().clamp(min=1)


def seldom_of_all(module: "Detector", x: Tensor, y: Tensor) -> Tensor:
    return of_rows(module, x, y).sum() / (x[:, 0] > 1).sum().clamp(min=1)


def of_the_last_class(module: "Detector", x: Tensor, y: Tensor) -> Tensor:
    return (module.boxes(x).square().sum(1) * (y > 3)).sum() / (y > 3).sum().clamp(min=1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("loss", "seed"), [(seldom, 0), (seldom_of_all, 0), (of_the_last_class, 0), (of_the_last_class, 1)]
)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.long
def test_a_batch_of_a_window_that_counts_nothing_adds_nothing(loss: Loss, seed: int, size: int) -> None:
    """Its divisor, clamped at 1, was added to those of the others, unsaid: weights were off by 0.7 to 4 %."""
    weights, _, _ = trained(loss, seed, None, rows=2 * ROWS)
    ours, _, sizes = trained(loss, seed, size, effective_batch_size=2 * ROWS)
    assert sizes == {size}
    torch.testing.assert_close(ours, weights, rtol=0, atol=1e-12)


def hardly_ever(module: "Detector", x: Tensor, y: Tensor) -> Tensor:
    counted = x[:, 0] > 1.5
    return of_rows(module, x, y)[counted].sum() / counted.sum().clamp(min=1)


def clamped_at(least: int, bound: float) -> Loss:
    def loss(module: "Detector", x: Tensor, y: Tensor) -> Tensor:
        counted = x[:, 0] > bound
        return of_rows(module, x, y)[counted].sum() / counted.sum().clamp(min=least)

    return loss


@pytest.mark.parametrize(
    ("loss", "seed", "words"),
    [
        (hardly_ever, 0, "does not know yet what the loss is a mean over"),
        (clamped_at(3, 1.0), 0, "can't prove by what training_step divides"),
        (clamped_at(2, 0.5), 1, "can't prove by what training_step divides"),
    ],
)
@pytest.mark.long
def test_what_a_window_can_not_prove_is_warned_of(loss: Loss, seed: int, words: str) -> None:
    """Rows of several loader batches are never there together: weights were off by 0.9 to 3.5 %, unsaid."""
    with pytest.warns(UserWarning, match=words):
        trained(loss, seed, 1, shows_warnings=True, effective_batch_size=2 * ROWS)


def test_a_window_of_counts_gives_no_warning() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained(masked, 0, 1, shows_warnings=True, effective_batch_size=2 * ROWS)
    assert not [one for one in caught if "MemoryBudget" in str(one.message)]


def test_rows_that_may_count_up_to_half_of_a_clamp_are_told_from_such_that_count_nothing() -> None:
    for alone, twice, is_vague in ((1, 1, False), (1, 2, False), (3, 3, True), (3, 4, False)):
        found = lone([alone], 0, adds_up=True)
        found.learn(WHOLE, (float(alone),))
        found.learn((0, 0), (float(twice),))
        assert found.totals() == [twice / 2 if twice > alone else 0]
        assert found.vague == ({0} if is_vague else set())


def lone(counts: list[float], *places: int, **options: Any) -> LoneCounts:
    """One term, which is divided by 1 for an unknown reason in the micro-batches of these places."""
    alone = [frozenset({0}) if place in places else frozenset[int]() for place in range(len(counts))]
    return LoneCounts(counts=[(count,) for count in counts], lone=alone, **options)


def test_the_total_is_looked_up_beside_a_micro_batch_that_counts_more() -> None:
    found = lone([1, 3, 1, 2], 0, 2)
    assert found.looks() == [(3, 0), (3, 2)]
    found.learn((3, 0), (2.0,))  # none of the first
    assert found.looks() == [(3, 2)]
    found.learn((3, 2), (3.0,))
    assert found.looks() == []
    assert found.totals() == [6.0]


def test_micro_batches_of_one_each_are_divided_by_two_as_one() -> None:
    found = lone([1, 1, 1, 0], 0, 1, 2)
    assert found.looks() == [(0, 1), (1, 2)]
    for pair in found.looks():
        found.learn(pair, (2.0,))
    assert found.totals() == [3.0]


def test_where_pairs_hold_less_the_whole_batch_tells() -> None:
    found = lone([1, 1, 0], 0, 1)
    found.learn((0, 1), (1.0,))
    assert found.looks() == [WHOLE]
    assert found.totals() is None
    found.learn(WHOLE, (1.0,))
    assert found.totals() == [1.0]


def test_neighbours_alone_where_rows_can_not_be_picked() -> None:
    assert lone([1, 4, 1], 0, 2, adjacent=True).looks() == [(1, 0), (1, 2)]
    assert lone([1, 0, 1], 0, 2, adjacent=True).looks() == [WHOLE]


def test_one_lone_micro_batch_among_empty_ones_is_looked_up_in_the_whole() -> None:
    assert lone([1, 0, 0], 0).looks() == [WHOLE]


def test_what_seems_a_sum_is_one_where_the_whole_batch_is_divided_by_the_same() -> None:
    for divisor in (1.0, 2.0):
        found = lone([1, 1, 1], 0, 1, 2, sums=frozenset({0}))
        assert found.looks() == [WHOLE]
        found.learn(WHOLE, (divisor,))
        assert found.totals() == [divisor]
        assert found.shown(0, divisor) is (Shown.OWN if divisor == 1 else Shown.KEPT)


def test_where_two_as_one_tell_neither_all_nor_nothing_the_whole_batch_tells() -> None:
    """`clamp(min=2)` over one that counts."""
    found = lone([2, 4, 5], 0)
    found.learn((1, 0), (5.0,))
    assert found.looks() == [WHOLE]
    found.learn(WHOLE, (10.0,))
    assert found.totals() == [10.0]


def test_a_graph_of_shapes_shows_its_divisor_and_holds_no_large_tensor() -> None:
    x = torch.randn(1 << 17, requires_grad=True)
    with saving_shapes_only():
        loss = (x * x.detach()).exp().sum() / torch.tensor(3.0)
    division: Any = loss.grad_fn
    assert float(division._saved_other) == 3
    exponential = division.next_functions[0][0].next_functions[0][0]
    assert exponential._saved_result.device.type == "meta"
    assert exponential._saved_result.shape == x.shape


def test_a_graph_of_shapes_goes_with_its_loss() -> None:
    """Nothing runs backward, which would free what the nodes hold: tanh saves its own result."""
    x = torch.randn(4, requires_grad=True)
    with saving_shapes_only():
        hidden = x.tanh()
        loss = hidden.sum()
    storage = StorageWeakRef(hidden.untyped_storage())
    del hidden, loss
    gc.collect()
    assert storage.expired()


def part(*labels: int) -> dict[str, Tensor]:
    return {"labels": torch.tensor(labels)}


def test_a_number_that_was_wrong_once_is_never_asked_again() -> None:
    """Rows of one kind agree with many numbers by chance: so a batch of positives brought "rows" back."""
    foretelling = Foretelling([[]])
    foretelling.learn([part(1, 0, 2, 0), part(1, 0), part(2, 0)], [[2.0, 1.0, 1.0]])
    kinds = {way.count.kind for way in foretelling.ways[0]}
    assert kinds == {"labels", "nonzero", "rows", "positive", "equal", "above"}
    foretelling.learn([part(1, 0, 0), part(1, 0), part(0)], [[1.0, 1.0, 0.0]])
    assert [way.count for way in foretelling.ways[0]] == [
        BatchCount("nonzero", "['labels']"),
        BatchCount("positive", "['labels']"),
        BatchCount("above", "['labels']", value=0),
    ]
    foretelling.forget_wrong(part(1, 1, 0), [3.0])
    assert foretelling.ways == [[]]
    foretelling.learn([part(1, 1), part(1), part(1)], [[2.0, 1.0, 1.0]])
    assert foretelling.ways == [[]]
    assert foretelling.is_silent(0)


def test_a_number_is_believed_on_divisors_of_1_once_totals_that_were_looked_up_agree() -> None:
    foretelling = Foretelling([[]])
    foretelling.learn([part(1, 2), part(1), part(2)], [[2.0, 1.0, 1.0]])
    for _ in range(3):
        assert foretelling.is_silent(0)
        foretelling.confirm(0, part(1, 0, 2), 2.0, Shown.KEPT)  # not the rows
    assert not foretelling.is_silent(0)
    assert [way.count for way in foretelling.ways[0]] == [BatchCount("nonzero", "['labels']")]


def test_totals_looked_up_while_no_number_was_left_confirm_none() -> None:
    foretelling = Foretelling([[]])
    for _ in range(3):
        foretelling.confirm(0, part(1, 0), 1.0, Shown.KEPT)
    foretelling.learn([part(1, 2), part(1), part(2)], [[2.0, 1.0, 1.0]])
    assert foretelling.is_silent(0)
    for _ in range(3):
        foretelling.confirm(0, part(1, 2), 2.0)
    assert not foretelling.is_silent(0)
    foretelling.confirm(0, part(1, 2), 1.0, Shown.KEPT)  # all were wrong
    assert foretelling.is_silent(0)


def test_the_least_divisor_is_believed_once_it_was_a_count_twelve_times_and_never_kept() -> None:
    foretelling = Foretelling([[], []])
    for kept, is_count in ((0, True), (1, False)):
        for _ in range(3):
            assert kept in foretelling.doubted()
            assert foretelling.may_be_kept(kept, 2.0)
            assert foretelling.may_be_kept(kept, 3.0)  # any, until some have been looked at
            foretelling.confirm(kept, part(1, 0, 0), 6.0)
        assert not foretelling.may_be_kept(kept, 3.0)
        for _ in range(9):
            assert foretelling.count_of(kept, part(1, 0), 2.0, is_one=False) is None
            foretelling.confirm(kept, part(1, 0, 0), 6.0, Shown.OWN if is_count else Shown.KEPT)
        assert foretelling.count_of(kept, part(1, 0), 2.0, is_one=False) == (2.0 if is_count else None)
    assert foretelling.may_be_kept(0, 1.5)
    assert foretelling.count_of(0, part(1, 0), 1.5, is_one=False) is None
    assert foretelling.unlike() == frozenset()


def test_divisors_that_are_kept_at_more_than_the_least_add_up_here_and_there_only() -> None:
    """The largest class's share, the number of classes: they are looked up in every batch."""
    foretelling = Foretelling([[]])
    for _ in range(3):
        assert foretelling.may_be_kept(0, 4.0)
        foretelling.confirm(0, part(1, 0, 0), 9.0)
    foretelling.confirm(0, part(1, 0, 0), 9.0, Shown.KEPT)
    assert foretelling.unlike() == frozenset()
    assert foretelling.may_be_kept(0, 2.0)
    assert foretelling.unlike() == {0}
    assert foretelling.may_be_kept(0, 100.0)


def test_a_doubted_divisor_is_looked_up_in_the_whole_where_that_can_be_run() -> None:
    found = lone([2, 4, 5], 0, doubted=frozenset({0}))
    assert found.looks() == [WHOLE]
    found.runs_whole = False
    assert found.looks() == [(1, 0)]
    assert lone([2, 4, 5], 0, whole=frozenset({0})).looks() == [WHOLE]


def test_what_is_known_of_one_term_is_not_believed_of_another_in_its_place() -> None:
    foretelling = Foretelling()
    foretelling.learn([part(1, 0), part(1), part(0)], [None], ["/Div/Sum"])
    for _ in range(12):
        foretelling.confirm_sum(0, Shown.OWN)
    assert foretelling.is_constant(0)
    foretelling.learn([part(1, 0), part(1), part(0)], [None], ["/Div/Sum"])
    assert foretelling.is_constant(0)
    foretelling.learn([part(1, 0), part(1), part(0)], [None], ["/Mul/Sum"])
    assert not foretelling.is_constant(0)


def test_nothing_is_learned_of_a_term_that_counts_nothing() -> None:
    foretelling = Foretelling([[]])
    foretelling.learn([part(0, 0), part(0)], [[0.0, 0.0]])
    foretelling.learn([part(1, 0), part(1), part(0)], [None])
    assert foretelling.ways == [[]]
    foretelling.learn([part(1, 0), part(1), part(0)], [[1.0, 1.0, 0.0]])
    assert foretelling.ways[0]


class Wide(Detector):
    """Whose whole batch does not fit, forward alone."""

    def __init__(self, loss: Loss) -> None:
        super().__init__(loss)
        self.net = nn.Sequential(nn.Linear(6, 4096), nn.Tanh(), nn.Linear(4096, CLASSES))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def of_wide_rows(loss: Loss, *budget: MemoryBudget) -> Tensor:
    torch.manual_seed(0)
    module = Wide(loss).double()
    data = TensorDataset(torch.randn(128, 6, dtype=torch.float64), torch.randint(0, CLASSES, (128,)))
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=list(budget),
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=64))
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def by_own_weights(module: Detector, x: Tensor, y: Tensor) -> Tensor:
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5], dtype=torch.float64)[y]
    return (of_rows(module, x, y) * weights).sum() / weights.sum()


def halved(module: Detector, x: Tensor, y: Tensor) -> Tensor:
    return 0.5 * of_rows(module, x, y).sum()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("loss", [by_own_weights, masked, hinge])
@pytest.mark.long
def test_looking_at_a_batch_keeps_the_budget(loss: Loss, size: int) -> None:
    """Where the whole batch does not fit, two micro-batches as one tell of what adds up."""
    ours = of_wide_rows(loss, MemoryBudget("3MiB", micro_batch_size=size, within="step"))
    torch.testing.assert_close(ours, of_wide_rows(loss), rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.long
def test_a_divisor_of_no_law_needs_a_whole_batch_that_fits(size: int) -> None:
    with pytest.raises(BudgetError, match="can't be run as one"):
        of_wide_rows(by_the_root, MemoryBudget("3MiB", micro_batch_size=size, within="step"))


def test_what_is_taken_for_a_sum_without_the_whole_batch_is_said() -> None:
    with pytest.warns(UserWarning, match="takes a term of the loss for a sum"):
        ours = of_wide_rows(halved, MemoryBudget("3MiB", micro_batch_size=4, within="step"))
    torch.testing.assert_close(ours, of_wide_rows(halved), rtol=0, atol=1e-12)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*takes a term of the loss for a sum")
        of_wide_rows(halved, MemoryBudget("1GiB", micro_batch_size=4, within="step"))


def test_a_seeming_sum_of_two_micro_batches_that_differ_needs_the_whole() -> None:
    found = lone([2, 2, 2, 2], 0, 1, 2, 3, sums=frozenset({0}), runs_whole=False)
    assert found.looks() == [(0, 1), (2, 3)]
    found.learn((0, 1), (2.0,))
    found.learn((2, 3), (3.0,))
    assert found.looks() == [WHOLE]
    found = lone([2, 2, 2], 0, 1, 2, sums=frozenset({0}), runs_whole=False)
    for pair in found.looks():
        found.learn(pair, (2.0,))
    assert found.totals() == [2.0]
    assert found.unproven == {0}


def test_what_a_total_shows_of_the_divisors() -> None:
    """Kept ones explain what is missing, as far as they go."""
    for counts, total, shown in (
        ([2, 4, 5], 11.0, Shown.OWN),
        ([2, 4, 5], 9.5, Shown.KEPT),
        ([2, 4, 5], 8.0, Shown.UNLIKE),
        ([2, 4, 5], 12.0, Shown.UNLIKE),
        ([-2, -4, -5], -10.0, Shown.KEPT),
    ):
        assert lone([float(count) for count in counts], 0, 1, 2).shown(0, total) is shown


@pytest.mark.parametrize(("twice", "total"), [((1.0, 1.0), 0.0), ((1.0, 2.0), 1.0)])
def test_a_batch_of_one_of_several_ranks_that_counts_one_or_nothing_is_looked_at_twice(
    twice: tuple[float, float], total: float
) -> None:
    """Its own divisor is kept as those of its micro-batches are: each beside itself is divided by 2 or by 1."""
    found = lone([1, 1], 0, 1, adds_up=True)
    found.learn((0, 1), (1.0,))
    assert found.looks() == [None]
    found.learn(None, (1.0,))
    assert found.looks() == [(0, 0), (1, 1)]
    for part, divisor in enumerate(twice):
        found.learn((part, part), (divisor,))
    assert (found.looks(), found.totals(), found.least(0)) == ([], [total], 1.0)
