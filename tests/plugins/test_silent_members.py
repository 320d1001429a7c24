"""Further members of the families of silent differences: equal to the unsplit run, or not split and said why."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_memkit import MemoryBudget
from lightning_memkit.micro_batching.sizes.sizing import BudgetError
from lightning_memkit.utilities.rewindable import Rewindable
from tests.plugins.toys import trained, weights

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")
STEPS, ROWS, CLASSES = 5, 16, 4
Loss = Callable[["Classifier", dict[str, Tensor], Tensor], Tensor]


class Classifier(LightningModule):
    """Scores of four classes, most rows of class 0; the loss is another one each time."""

    accuracy: Any
    curve: Any
    notes: Any
    drawn: Any

    def __init__(self, loss: Loss, prepare: Callable[["Classifier"], None] | None = None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES))
        self.loss = loss
        self.given: list[Any] = []
        self.reported: list[float] = []
        if prepare is not None:
            prepare(self)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        scores = self.net(batch["x"])
        loss = self.loss(self, batch, scores)
        return {"loss": loss, "rows": len(scores), "top": scores.max().detach(), "ids": batch["id"].tolist()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.given.append((outputs["rows"], float(outputs["top"]), outputs["ids"]))
        self.reported.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def rows() -> DataLoader:
    generator = torch.Generator().manual_seed(3)
    data = []
    for index in range(64):
        label = torch.randint(1, CLASSES, (), generator=generator) * (
            torch.rand((), generator=generator) < 0.3
        )
        x = torch.randn(6, generator=generator, dtype=torch.float64)
        group = torch.randint(0, 3, (), generator=generator)
        data.append({"x": x, "y": label, "group": group, "id": torch.tensor(index)})
    return DataLoader(data, batch_size=ROWS)  # pyright: ignore[reportArgumentType]


def run(
    loss: Loss, prepare: Callable[[Classifier], None] | None = None, size: Any = None
) -> tuple[Any, MemoryBudget | None, dict[str, Tensor]]:
    budget = None if size is None else MemoryBudget("1GiB", micro_batch_size=size, within="step")
    module, fitted = trained(
        *([] if budget is None else [budget]),
        module=lambda: Classifier(loss, prepare),
        data=rows(),
        dtype=torch.float64,
        max_steps=STEPS,
        gradient_clip_val=None,
    )
    return module, budget, dict(fitted.callback_metrics)


def assert_split_and_equal(
    loss: Loss, size: int, prepare: Callable[[Classifier], None] | None = None
) -> None:
    plain, _, _ = run(loss, prepare)
    split, budget, _ = run(loss, prepare, size=size)
    assert budget is not None
    assert budget.sizing is not None
    assert budget.sizing.micro_batch_size == size
    torch.testing.assert_close(weights(split), weights(plain), rtol=1e-10, atol=1e-12)
    assert split.reported == pytest.approx(plain.reported, rel=1e-9)


def cross_entropy(module: Classifier, batch: dict[str, Tensor], scores: Tensor) -> Tensor:
    return F.cross_entropy(scores, batch["y"])


def by_positives(module: Classifier, batch: dict[str, Tensor], scores: Tensor) -> Tensor:
    """As detectors do: all rows over the number of those with an object, of which there may be none."""
    targets = F.one_hot(batch["y"], CLASSES).to(scores)
    total = F.binary_cross_entropy_with_logits(scores, targets, reduction="sum")
    return total / (batch["y"] > 0).sum().clamp(min=1)


def with_lasso(module: Classifier, batch: dict[str, Tensor], scores: Tensor) -> Tensor:
    """A norm of each neuron's weights."""
    first: Any = module.net[0]
    return F.cross_entropy(scores, batch["y"]) + 0.1 * first.weight.norm(dim=1).sum()


def with_orthogonality(module: Classifier, batch: dict[str, Tensor], scores: Tensor) -> Tensor:
    """How far the weights are from a rotation."""
    first: Any = module.net[0]
    gram = first.weight.T @ first.weight
    return (
        F.cross_entropy(scores, batch["y"], reduction="sum") / 16
        + 0.1 * (gram - torch.eye(6).to(gram)).norm()
    )


def with_spectral_hinge(module: Classifier, batch: dict[str, Tensor], scores: Tensor) -> Tensor:
    """Singular values above a bound, and the norm of all weights."""
    first: Any = module.net[0]
    largest = torch.linalg.matrix_norm(first.weight, 2)
    every = torch.cat([parameter.flatten() for parameter in module.parameters()])
    mean = F.cross_entropy(scores, batch["y"], weight=torch.tensor([0.2, 1.0, 2.0, 1.0]).to(scores))
    return mean + F.relu(largest - 0.5) + 0.01 * every.norm()


def positives(module: Classifier, batch: dict[str, Tensor], scores: Tensor) -> Tensor:
    """A mean over the rows that are of another class than the most."""
    return F.cross_entropy(scores, torch.where(batch["y"] > 0, batch["y"], -100))


def by_uncertainty(module: Classifier, batch: dict[str, Tensor], scores: Tensor) -> Tensor:
    """Tasks with learned weights (Kendall et al., 2018), of unlike divisors."""
    tasks = (cross_entropy(module, batch, scores), positives(module, batch, scores), scores.square().mean())
    return sum(
        ((-s).exp() * task + s for s, task in zip(module.notes, tasks, strict=True)), scores.new_zeros(())
    )


def over_masks(module: Classifier, batch: dict[str, Tensor], scores: Tensor) -> Tensor:
    """Learned weights of a mean over rows that a micro-batch may have none of: 0 times nan twice."""
    first, second, _ = module.notes.exp()
    return (
        first * cross_entropy(module, batch, scores) + second * over_mask(module, batch, scores) + second / 2
    )


def by_shares(module: Classifier, batch: dict[str, Tensor], scores: Tensor) -> Tensor:
    """Learned weights that add up to one."""
    first, second, _ = module.notes.softmax(0)
    return first * cross_entropy(module, batch, scores) + second * positives(module, batch, scores)


def by_deviation(module: Classifier, batch: dict[str, Tensor], scores: Tensor) -> Tensor:
    """A task over a learned variance, with a constant within, and one without."""
    deviation = module.notes[0] + 1
    first = (cross_entropy(module, batch, scores) + 0.5) / (2 * deviation**2)
    return first + deviation.log() + positives(module, batch, scores)


def of_one_factor(module: Classifier, batch: dict[str, Tensor], scores: Tensor) -> Tensor:
    """One learned factor of two means of unlike divisors."""
    return module.notes[0].exp() * (cross_entropy(module, batch, scores) + positives(module, batch, scores))


def of_one_mean(module: Classifier, batch: dict[str, Tensor], scores: Tensor) -> Tensor:
    """A mean that is there twice, once with a learned factor, and another."""
    mean = cross_entropy(module, batch, scores)
    return module.notes[0].exp() * mean + 0.3 * mean + positives(module, batch, scores)


def of_one_divisor(module: Classifier, batch: dict[str, Tensor], scores: Tensor) -> Tensor:
    """One learned factor of two means of one divisor."""
    mean = cross_entropy(module, batch, scores)
    return module.notes[0].exp() * (mean + F.mse_loss(scores, torch.ones_like(scores))) + 0.3 * mean


def by_group(module: Classifier, batch: dict[str, Tensor], scores: Tensor) -> Tensor:
    """The mean of means over groups, of which a micro-batch may hold none."""
    each, groups = F.cross_entropy(scores, batch["y"], reduction="none"), batch["group"]
    means = [each[groups == group].sum() / (groups == group).sum().clamp(min=1) for group in range(3)]
    return torch.stack(means).mean()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("loss", [with_lasso, with_orthogonality, with_spectral_hinge])
@pytest.mark.long
def test_penalties_on_weights_that_are_no_sums_are_the_batch_s(loss: Loss, size: int) -> None:
    """A root follows a sum, and no row is in it."""
    assert_split_and_equal(loss, size)


def by_scalars(module: Classifier, batch: dict[str, Tensor], scores: Tensor) -> Tensor:
    """A weight that is a parameter by itself, added to the loss as it is."""
    first: Any = module.notes
    return (-first).exp() * cross_entropy(module, batch, scores) + first + positives(module, batch, scores)


def by_halves(module: Classifier, batch: dict[str, Tensor], scores: Tensor) -> Tensor:
    """Half of a parameter is added: it was scaled where all of its gradients come together, at every later step."""
    tasks = (cross_entropy(module, batch, scores), positives(module, batch, scores))
    terms = (task / (2 * s**2) + s / 2 for s, task in zip(module.notes + 1, tasks, strict=False))
    return sum(terms, scores.new_zeros(())) + module.notes[2] / 2


def of_one_factor_alike(module: Classifier, batch: dict[str, Tensor], scores: Tensor) -> Tensor:
    """One learned factor of two means of one divisor and of itself, beside a mean of another."""
    factor = module.notes[0].exp()
    means = cross_entropy(module, batch, scores) + F.mse_loss(scores, torch.ones_like(scores))
    return factor * (means + module.notes[1]) + positives(module, batch, scores)


def of_smooth_labels(module: Classifier, batch: dict[str, Tensor], scores: Tensor) -> Tensor:
    """Two terms that torch adds up within its function, below one learned factor."""
    smooth = F.cross_entropy(scores, batch["y"], label_smoothing=0.1)
    return (-module.notes[0]).exp() * smooth + module.notes[0] + positives(module, batch, scores)


LEARNED = [
    by_uncertainty,
    by_shares,
    by_deviation,
    by_scalars,
    by_halves,
    of_one_divisor,
    of_one_factor_alike,
    of_one_mean,
    of_smooth_labels,
    over_masks,
]


def with_numbers(module: Classifier) -> None:
    module.notes = nn.Parameter(torch.tensor([0.2, -0.1, 0.4], dtype=torch.float64))


def with_number(module: Classifier) -> None:
    module.notes = nn.Parameter(torch.tensor(0.2, dtype=torch.float64))


@pytest.mark.sampled(7)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("loss", LEARNED)
@pytest.mark.long
def test_learned_weights_of_tasks_get_the_batch_s_gradients(loss: Loss, size: int) -> None:
    """What scales a task's gradient has to reach the weight that the task is multiplied with."""
    assert_split_and_equal(loss, size, with_number if loss is by_scalars else with_numbers)


def test_a_learned_weight_of_several_tasks_of_unlike_divisors_is_refused() -> None:
    with pytest.raises(BudgetError, match="miss the whole batch's by"):
        run(of_one_factor, with_numbers, size=3)


Reduced = Callable[[Tensor, Tensor], Tensor]  # of a vector of losses and one of weights
VECTORS: dict[str, Reduced] = {
    "a sum": lambda losses, w: (losses * (-w).exp() + w).sum(),
    "a mean": lambda losses, w: (w.exp() * losses + w / 2).mean(),
    "variances": lambda losses, w: (losses / (2 * (w + 1) ** 2)).sum() + (w + 1).log().sum(),
    "a product": lambda losses, w: losses @ w.softmax(0),
    "a product, the weights first": lambda losses, w: torch.dot(w.exp(), losses) + losses[0],
    "constants": lambda losses, w: (losses * torch.tensor([1.0, 2.0, 0.5]).to(w)).sum(),
    "a product with constants": lambda losses, w: losses @ torch.tensor([1.0, 2.0, 0.5]).to(w),
    "numbers of it": lambda losses, w: losses[0] * w[0].exp() + losses[-1] + w[2] * losses[1],
    "its parts": lambda losses, w: sum(map(torch.mul, losses.unbind(), w.exp()), w.new_zeros(())),
}


def over_mask(module: Classifier, batch: dict[str, Tensor], scores: Tensor) -> Tensor:
    """A mean that the step divides by itself: nothing over nothing where no row counts."""
    counts = (batch["y"] > 0).to(scores)
    return (scores.square().sum(1) * counts).sum() / counts.sum()


@pytest.mark.sampled(13)
@pytest.mark.parametrize("task", [positives, over_mask])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", VECTORS)
@pytest.mark.long
def test_a_vector_of_losses_is_weighed_number_by_number(name: str, size: int, task: Loss) -> None:
    """As multi-task code has it: `torch.stack(losses) * weights`."""

    def loss(module: Classifier, batch: dict[str, Tensor], scores: Tensor) -> Tensor:
        tasks = [cross_entropy(module, batch, scores), task(module, batch, scores)]
        return VECTORS[name](torch.stack([*tasks, scores.square().mean()]), module.notes)

    assert_split_and_equal(loss, size, with_numbers)


def own(score: Tensor, label: Tensor) -> Tensor:
    return F.cross_entropy(score, label)


OF_ROWS: dict[str, Callable[[list[Tensor], Tensor], Tensor]] = {
    "a mean of squares": lambda each, w: sum((loss**2 for loss in each), w.new_zeros(())) / len(each),
    "a mean of a vector of roots": lambda each, w: torch.stack([(loss + 1).sqrt() for loss in each]).mean(),
    "a weighed vector": lambda each, w: (torch.stack(each) * w).sum() / w.sum(),
    "a weighed vector of sums": lambda each, w: (
        (torch.stack([a + a.exp() for a in each]) * w).sum() / w.sum()
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", OF_ROWS)
@pytest.mark.long
def test_what_bends_each_row_s_own_loss_bends_no_batch_s(name: str, size: int) -> None:
    def loss(module: Classifier, batch: dict[str, Tensor], scores: Tensor) -> Tensor:
        each = [own(score, label) for score, label in zip(scores, batch["y"], strict=True)]
        return OF_ROWS[name](each, 1.0 + batch["x"][:, 0].abs()) + positives(module, batch, scores)

    assert_split_and_equal(loss, size)


@pytest.mark.parametrize("several", [True, False], ids=["of groups", "of heads"])
def test_what_bends_the_means_of_several_rows_is_refused(several: bool) -> None:
    def loss(module: Classifier, batch: dict[str, Tensor], scores: Tensor) -> Tensor:
        labels = batch["y"]
        means = (
            [
                F.mse_loss(scores[labels == label, 0], batch["x"][labels == label, 0])
                for label in labels.unique()
            ]
            if several
            else [F.mse_loss(scores[:, head], batch["x"][:, head]) for head in range(CLASSES)]
        )
        return sum((mean.sqrt() for mean in means), scores.new_zeros(()))

    with pytest.raises(BudgetError, match="no sum over its rows: sqrt"):
        run(loss, size=3)


def by_group_and_number(module: Classifier, batch: dict[str, Tensor], scores: Tensor) -> Tensor:
    """A regularizer beside means of which the first may count nothing in a whole batch."""
    rare = (batch["id"] == 5).to(scores)
    first = (scores.square().sum(1) * rare).sum() / rare.sum().clamp(min=1)
    layer: Any = module.net[0]
    return first + cross_entropy(module, batch, scores) + layer.weight.square().sum()


def by_epsilon(module: Classifier, batch: dict[str, Tensor], scores: Tensor) -> Tensor:
    """An epsilon that each micro-batch has, and the batch once."""
    counts = 0.5 + batch["x"][:, 0].abs()
    each = F.cross_entropy(scores, batch["y"], reduction="none")
    return 0.7 * (each * counts).sum() / (counts.sum() + 1e-6) + scores.square().mean()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("loss", [by_positives, by_group, by_group_and_number, by_epsilon])
@pytest.mark.long
def test_divisors_that_are_kept_from_being_zero_are_the_batch_s(loss: Loss, size: int) -> None:
    assert_split_and_equal(loss, size)


def test_what_a_step_returns_is_the_whole_batch_s() -> None:
    plain, _, _ = run(cross_entropy)
    split, _, _ = run(cross_entropy, size=3)
    assert len(split.given) == STEPS
    for (count, top, ids), (count_of_all, top_of_all, ids_of_all) in zip(
        split.given, plain.given, strict=True
    ):
        assert (count, ids) == (count_of_all, ids_of_all)
        assert top == pytest.approx(top_of_all, rel=1e-9)


def with_metrics(module: Classifier) -> None:
    module.accuracy = torchmetrics.Accuracy("multiclass", num_classes=CLASSES)
    module.curve = torchmetrics.AveragePrecision("multiclass", num_classes=CLASSES)


def measured(module: Classifier, batch: dict[str, Tensor], scores: Tensor) -> Tensor:
    module.accuracy(scores, batch["y"])
    module.log("accuracy", module.accuracy, on_step=False, on_epoch=True)
    module.curve.update(scores.detach(), batch["y"])
    return cross_entropy(module, batch, scores)


@pytest.mark.parametrize("size", [3, "auto"])
@pytest.mark.long
def test_metrics_of_counts_and_of_rows_compose(size: Any) -> None:
    plain, _, logged = run(measured, with_metrics)
    split, _, logged_in_parts = run(measured, with_metrics, size)
    torch.testing.assert_close(weights(split), weights(plain), rtol=1e-10, atol=1e-12)
    assert logged_in_parts["accuracy"] == logged["accuracy"]
    assert float(split.curve.compute()) == pytest.approx(float(plain.curve.compute()), rel=1e-6)


def hardest(module: Classifier, batch: dict[str, Tensor], scores: Tensor) -> Tensor:
    each = F.cross_entropy(scores, batch["y"], reduction="none")
    return each.topk(max(1, len(each) // 2)).values.mean()


def hardest_by_index(module: Classifier, batch: dict[str, Tensor], scores: Tensor) -> Tensor:
    """Of what the graph shows a mean over rows."""
    each = F.cross_entropy(scores, batch["y"], reduction="none")
    return each[each.detach().argsort(descending=True)[: max(1, len(each) // 2)]].mean()


def harder_than_most(module: Classifier, batch: dict[str, Tensor], scores: Tensor) -> Tensor:
    each = F.cross_entropy(scores, batch["y"], reduction="none")
    return (each * (each.detach() >= each.detach().median())).sum() / len(each)


def trimmed(module: Classifier, batch: dict[str, Tensor], scores: Tensor) -> Tensor:
    """Without the rows whose labels are the likeliest to be wrong."""
    each = F.cross_entropy(scores, batch["y"], reduction="none")
    return (each * (each.detach() <= each.detach().quantile(0.8))).sum() / len(each)


def balanced(module: Classifier, batch: dict[str, Tensor], scores: Tensor) -> Tensor:
    """A router's balancing loss: the shares of rows, of which no gradient runs, times mean probabilities."""
    shares = F.one_hot(scores.argmax(1), CLASSES).to(scores).mean(0)
    return cross_entropy(module, batch, scores) + 0.01 * CLASSES * (shares * scores.softmax(1).mean(0)).sum()


def normalized(module: Classifier, batch: dict[str, Tensor], scores: Tensor) -> Tensor:
    if scores.requires_grad:
        scores.register_hook(lambda gradient: gradient / gradient.norm())
    return cross_entropy(module, batch, scores)


def with_notes(module: Classifier) -> None:
    module.notes = defaultdict(list)


def noting(module: Classifier, batch: dict[str, Tensor], scores: Tensor) -> Tensor:
    loss = cross_entropy(module, batch, scores)
    module.notes["loss"].append(float(loss.detach()))
    return loss


def drawing(source: Callable[[], Iterator[Any]]) -> tuple[Loss, Callable[[Classifier], None]]:
    def prepare(module: Classifier) -> None:
        module.drawn = source()

    def loss(module: Classifier, batch: dict[str, Tensor], scores: Tensor) -> Tensor:
        return cross_entropy(module, batch, scores) * (1 + next(module.drawn) % 3)

    return loss, prepare


UNSPLIT: dict[str, tuple[Loss, Callable[[Classifier], None] | None, str]] = {
    "the hardest half": (hardest, None, "act on each other"),
    "the hardest half, by index": (hardest_by_index, None, "act on each other"),
    "harder than most": (harder_than_most, None, "act on each other"),
    "without the hardest": (trimmed, None, "act on each other"),
    "a router's balance": (balanced, None, "a factor that is made of the batch.s rows|act on each other"),
    "a gradient's norm": (normalized, None, "half of the loss has not half of its gradients"),
    "losses in a dict": (noting, with_notes, "notes"),
    "a counter": (*drawing(itertools.count), "drawn"),
    "a cycle": (*drawing(lambda: itertools.cycle([0, 1, 2])), "drawn"),
    "a generator": (*drawing(lambda: (number for number in range(10**6))), "drawn"),
    "a list's iterator": (*drawing(lambda: iter(list(range(10**4)))), "drawn"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", UNSPLIT)
def test_what_micro_batches_would_change_is_not_split(case: str) -> None:
    loss, prepare, words = UNSPLIT[case]
    with pytest.raises(BudgetError, match=words):
        run(loss, prepare, size=3)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", UNSPLIT)
def test_what_micro_batches_would_change_is_left_whole_and_bitwise(case: str) -> None:
    loss, prepare, _ = UNSPLIT[case]
    plain, _, _ = run(loss, prepare)
    whole, _, _ = run(loss, prepare, size=ROWS)
    assert torch.equal(weights(whole), weights(plain))
    if prepare is with_notes:
        assert whole.notes == plain.notes


def test_an_iterator_goes_back_to_places_within_each_other() -> None:
    iterator = Rewindable(iter(range(10)))
    assert next(iterator) == 0
    outer = iterator.mark()
    assert [next(iterator), next(iterator)] == [1, 2]
    inner = iterator.mark()
    assert [next(iterator), next(iterator)] == [3, 4]
    inner.go_back()
    assert next(iterator) == 3
    outer.go_back()
    assert list(iterator) == list(range(1, 10))
