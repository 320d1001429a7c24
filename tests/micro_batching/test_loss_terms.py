"""What the graph behind a loss tells: its terms, how they add up, and what none of it shows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_memkit.micro_batching.graph.agreed_rules import agreed
from lightning_memkit.micro_batching.graph.learned_rules import (
    UNTOLD_TERM,
    JointTerm,
    UnlikeDivisors,
    learned,
)
from lightning_memkit.micro_batching.graph.loss_rules import VARYING_FACTOR, LossRules
from lightning_memkit.micro_batching.graph.loss_walk import terms_of
from lightning_memkit.micro_batching.graph.term_rules import Law
from lightning_memkit.micro_batching.proof.comparison import SCALE, Comparison, spans_of
from lightning_memkit.micro_batching.shares.foreseen import (
    MistakenTotalsError,
    UnforeseenLossError,
    VaryingFactorError,
)
from lightning_memkit.micro_batching.shares.step_shares import StepShares

Loss = Callable[[Tensor, slice], Tensor]
ROWS, CLASSES = 6, 4
GENERATOR = torch.Generator().manual_seed(3)
LABELS = torch.tensor([0, 3, 2, 3, 1, 0])
MASK = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.0])
WEIGHTS = torch.tensor([1.0, 7.0, 0.25, 3.0])
WHOLE, PARTS = slice(0, ROWS), (slice(0, 2), slice(2, 6))
LOGITS = torch.randn(ROWS, CLASSES, generator=GENERATOR)


def each(x: Tensor, rows: slice) -> Tensor:
    return F.cross_entropy(x, LABELS[rows], reduction="none")


def seen(loss: Loss, *slices: slice) -> list[Any]:
    # What comes of a product is no parameter.
    return [
        terms_of(loss(LOGITS[rows].clone().requires_grad_() @ torch.eye(CLASSES), rows)) for rows in slices
    ]


def rules_of(loss: Loss) -> LossRules | str:
    whole, *parts = seen(loss, WHOLE, *PARTS)
    return learned(whole, parts)


def ranked(x: Tensor, rows: slice) -> Tensor:
    """A mean over pairs of a positive and a negative, where there are both."""
    scores, positive = x[:, 0], torch.tensor([1, 0, 1, 1, 0, 0])[rows] > 0
    loss = scores.square().mean()
    if positive.any() and not positive.all():
        loss = loss + F.relu(1 - scores[positive, None] + scores[None, ~positive]).mean()
    return loss


@pytest.mark.parametrize(
    ("whole", "parts", "told"),
    [
        (slice(0, 2), (slice(0, 1), slice(1, 2)), JointTerm),  # of which the halves have nothing
        (slice(2, 6), (slice(2, 4), slice(4, 6)), JointTerm),
        (slice(0, 3), (slice(0, 1), slice(1, 3)), UNTOLD_TERM),  # one half has it, of other rows
    ],
)
def test_a_new_term_that_no_half_has_is_between_rows(whole: slice, parts: Any, told: Any) -> None:
    together, *halves = seen(ranked, whole, *parts)
    found = learned(together, halves)
    assert found == told if isinstance(told, str) else isinstance(found, told)
    without, *each_one = seen(ranked, slice(2, 4), slice(2, 3), slice(3, 4))
    known = learned(without, each_one)
    assert isinstance(known, LossRules)
    assert learned(together, halves, known=known) == found


def test_a_term_of_another_name_in_micro_batches_is_left_to_gradients() -> None:
    def halves_otherwise(x: Tensor, rows: slice) -> Tensor:
        return each(x, rows).mean() if rows == WHOLE else (each(x, rows) * torch.ones(())).mean()

    whole, *parts = seen(halves_otherwise, WHOLE, *PARTS)
    found = learned(whole, parts)
    assert isinstance(found, str)
    assert not isinstance(found, JointTerm)


@pytest.mark.parametrize(
    ("loss", "divisor", "law"),
    [
        (lambda x, r: F.cross_entropy(x, LABELS[r]), 6.0, Law.MEAN),
        (lambda x, r: F.cross_entropy(x, LABELS[r], weight=WEIGHTS), 15.25, Law.MEAN),
        (lambda x, r: F.cross_entropy(x, LABELS[r], ignore_index=3), 4.0, Law.MEAN),
        (lambda x, r: (each(x, r) * MASK[r]).sum() / MASK[r].sum(), 3.0, Law.MEAN),
        (lambda x, r: each(x, r)[MASK[r] > 0].mean(), 3.0, Law.MEAN),
        (lambda x, r: F.mse_loss(x, torch.zeros_like(x)), 24.0, Law.MEAN),
        (lambda x, r: each(x, r).sum() / 32, 32.0, Law.SUM),
        (lambda x, r: F.cross_entropy(x, LABELS[r], reduction="sum"), 1.0, Law.SUM),
    ],
    ids=["mean", "class weights", "ignored", "mask", "indexed", "mse", "over a constant", "sum"],
)
def test_a_divisor_and_how_it_adds_up(loss: Loss, divisor: float, law: Law) -> None:
    (whole,) = seen(loss, WHOLE)
    assert [float(term.divisor) for term in whole.terms] == [pytest.approx(divisor)]
    rules = rules_of(loss)
    assert isinstance(rules, LossRules)
    assert [rule.law for rule in rules.rules] == [law]


def test_terms_of_unlike_divisors_are_two() -> None:
    rules = rules_of(
        lambda x, r: F.cross_entropy(x, LABELS[r], weight=WEIGHTS) + 0.1 * x.logsumexp(1).square().mean()
    )
    assert isinstance(rules, LossRules)
    assert [rule.law for rule in rules.rules] == [Law.MEAN, Law.MEAN]


def test_a_root_of_a_mean_is_curved_and_a_product_of_two_as_well() -> None:
    assert seen(lambda x, r: each(x, r).mean().sqrt(), WHOLE)[0].curved == "sqrt"
    assert "product" in seen(lambda x, r: each(x, r).mean() * x.square().mean(), WHOLE)[0].curved


def balance(x: Tensor, rows: slice) -> Tensor:
    """A router's balancing loss: the shares of the experts are counted in the batch, and have no gradient."""
    shares = F.one_hot(x.argmax(1), CLASSES).to(x.dtype).mean(0)
    return CLASSES * (shares * x.softmax(1).mean(0)).sum()


def test_a_norm_of_weights_is_a_term_and_one_of_what_they_make_of_rows_is_curved() -> None:
    weight, embedded = nn.Parameter(torch.randn(40, CLASSES)), nn.Parameter(torch.randn(100, CLASSES))
    rows = torch.randn(ROWS, 40)
    loss = F.cross_entropy(rows @ weight, LABELS)
    of_weights = (
        weight.norm(),
        (weight - weight.detach()).square().sum().sqrt(),
        (weight.T @ weight - torch.eye(CLASSES)).norm(),
        F.relu(weight.norm(dim=1) - 1).sum(),
        torch.linalg.matrix_norm(weight, 2),
    )
    for penalty in of_weights:
        found = terms_of(loss + 0.1 * penalty)
        assert not found.curved
        assert len(found.terms) == 2
    for of_rows in ((rows @ weight).norm(), embedded[LABELS].norm(), (weight * rows.mean(0)[:, None]).norm()):
        found = terms_of(loss + 0.1 * of_rows)
        assert found.curved or found.opaque


def test_a_count_that_is_clamped_is_told_from_one_that_is_added_to() -> None:
    mask = MASK.double() * torch.tensor([1.0, 0, 0, 0, 0, 0])

    def rules(divide: Callable[[Tensor], Tensor]) -> LossRules | str:
        def loss(x: Tensor, r: slice) -> Tensor:
            return (each(x, r) * mask[r]).sum() / divide(mask[r].sum())

        whole, *parts = seen(loss, WHOLE, *PARTS)
        return learned(whole, parts, torch.float64)

    clamped, added = rules(lambda n: n.clamp(min=1e-6)), rules(lambda n: n + 1e-6)
    assert isinstance(clamped, LossRules)
    assert isinstance(added, LossRules)
    assert [rule.excess for rule in (*clamped.rules, *added.rules)] == [0.0, pytest.approx(1e-6, rel=1e-6)]


def test_a_factor_that_is_counted_in_the_batch_is_seen_where_gradients_hide_it() -> None:
    assert rules_of(lambda x, r: each(x, r).mean() + 1e-9 * balance(x, r)) == VARYING_FACTOR


def test_a_factor_that_is_a_row_s_own_or_the_same_for_all_is_allowed() -> None:
    tokens = torch.rand(ROWS, CLASSES, generator=torch.Generator().manual_seed(1)) + 0.1

    def by_row(x: Tensor, rows: slice) -> Tensor:
        return ((x * tokens[rows]).sum(1) / tokens[rows].sum(1)).mean()

    def by_class(x: Tensor, rows: slice) -> Tensor:
        return (WEIGHTS * x.softmax(1).mean(0)).sum()

    for loss in (by_row, by_class):
        rules = rules_of(loss)
        assert isinstance(rules, LossRules)
        assert [rule.law for rule in rules.rules] == [Law.MEAN]


def test_a_factor_that_varies_later_is_found_in_the_micro_batches_themselves() -> None:
    alike = torch.stack([LOGITS[0]] * ROWS)  # all rows go to one expert

    def run(logits: Tensor, rows: slice) -> Tensor:
        return balance(logits[rows].clone().requires_grad_(), rows)

    rules = learned(terms_of(run(alike, WHOLE)), [terms_of(run(alike, rows)) for rows in PARTS])
    assert isinstance(rules, LossRules)
    shares = StepShares(rules, [6.0], is_known=True)
    shares.scaled(run(LOGITS, PARTS[0]), 1 / 3, 1)
    with pytest.raises(VaryingFactorError, match="made of the batch's rows"):
        shares.scaled(run(LOGITS, PARTS[1]), 2 / 3, 1)


def test_a_total_of_nothing_that_was_foretold_wrongly_is_no_scale() -> None:
    rules = rules_of(lambda x, r: F.cross_entropy(x, LABELS[r]))
    assert isinstance(rules, LossRules)
    shares = StepShares(rules, [0.0], is_known=True)
    for rows in PARTS:
        loss = F.cross_entropy(LOGITS[rows].clone().requires_grad_(), LABELS[rows])
        shares.scaled(loss, 0.5, 1)
    with pytest.raises(MistakenTotalsError):
        shares.factor(shares.sums())


class ShowsItsDivisor(torch.autograd.Function):
    """A mean that says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.loss_divisor = len(x)
        ctx.save_for_backward(x)
        return x.square().sum() / len(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * 2 * x / len(x)


def test_a_function_of_the_user_s_own_may_show_its_divisor() -> None:
    rules = rules_of(lambda x, rows: ShowsItsDivisor.apply(x))
    assert isinstance(rules, LossRules)
    assert [rule.law for rule in rules.rules] == [Law.MEAN]


# Gradients


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clamps", [False, True])
def test_gradients_that_are_clamped_are_told_from_rounding(dtype: torch.dtype, clamps: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(CLASSES, CLASSES).to(dtype)
    if clamps:
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: grad.clamp(-1e-2, 1e-2))

    def gradient(scale: float) -> Tensor:
        model.zero_grad()
        (F.cross_entropy(model(LOGITS.to(dtype)), LABELS) * scale).backward()
        return (
            torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None]) / scale
        )

    comparison = Comparison(spans_of(model), gradient(1.0), gradient(SCALE))
    assert comparison.bends(gradient(0.5)) is clamps
    assert comparison.bends(gradient(0.5), gradient(1.0)) is clamps


def test_a_mean_over_pairs_of_rows_follows_no_law() -> None:
    found = rules_of(lambda x, r: F.cross_entropy(x, LABELS[r]) + 0.001 * (x @ x.T).square().mean())
    assert isinstance(found, UnlikeDivisors)
    assert found == "a term divided by 36000, and by 4000, 16000 in micro-batches of the same rows"


def test_what_is_added_to_rows_is_no_place_of_a_term_s_value() -> None:
    """The rows of torch's divergence are a difference, below the sum that is the term's number."""
    targets = torch.rand(ROWS, CLASSES, generator=GENERATOR).softmax(1)

    def divergence(x: Tensor, rows: slice) -> Tensor:
        main = F.kl_div(x.log_softmax(1), targets[rows], reduction="batchmean")
        return main + 0.1 * (each(x, rows) * MASK[rows]).sum() / MASK[rows].sum()

    (terms,) = seen(divergence, WHOLE)
    assert len(terms.terms) == 2
    for term in terms.terms:
        assert [tuple(one.shape) for one in term.top.number.node._input_metadata] == [()]


def test_a_constant_belongs_to_the_term_that_it_is_added_to() -> None:
    (terms,) = seen(lambda x, rows: 2 - (each(x, rows).mean() + 0.5) + 0.1 * x.square().sum(), WHOLE)
    means, squares = terms.terms
    assert (means.summand.number.node.name(), means.summand.gain) == ("RsubBackward1", 1.0)
    assert (means.top.number.node.name(), means.top.gain) == ("MeanBackward0", -1.0)
    assert squares.summand is squares.top


def over_root(divided: Callable[[Tensor, float], Tensor]) -> LossRules | str:
    return rules_of(lambda x, r: divided(each(x, r), float(len(each(x, r))) ** 0.5))


@pytest.mark.parametrize("divided", [lambda loss, n: loss.sum() / n, lambda loss, n: loss.sum() * (1 / n)])
def test_a_number_of_the_step_s_own_that_follows_no_law_is_looked_up(
    divided: Callable[[Tensor, float], Tensor],
) -> None:
    found = over_root(divided)
    assert isinstance(found, LossRules)
    assert [rule.law for rule in found.rules] == [Law.OWN]
    assert found.looked_up == {0}


def test_a_reduction_s_own_divisor_that_follows_no_law_is_not() -> None:
    assert isinstance(rules_of(lambda x, r: (x @ x.T).square().mean() / torch.tensor(2.0)), UnlikeDivisors)
    # Whose number it is does not show.
    assert isinstance(over_root(lambda loss, n: loss.mean() * (len(loss) / n)), UnlikeDivisors)


def added(labels: list[int]) -> Any:
    """Terms of a mean over rows; a second loss is added to all rows where one of them has the label 1."""
    own = torch.randn(len(labels), 3, requires_grad=True) @ torch.eye(3)
    losses = own.gather(1, torch.tensor(labels)[:, None])[:, 0]
    return terms_of((losses + own.square().mean(1) if 1 in labels else losses).mean())


def test_a_name_that_a_term_had_in_compared_rows_is_read_later_and_no_other() -> None:
    usual, more = added([0, 2]), added([1, 2])
    assert usual.terms[0].name != more.terms[0].name
    rules = learned(added([0, 2, 1, 2]), [usual, more])
    assert isinstance(rules, LossRules)
    assert rules.read(usual).divisors == rules.read(more).divisors == (2.0,)
    narrow = learned(added([0, 2, 0]), [usual, added([0])])
    assert isinstance(narrow, LossRules)
    with pytest.raises(UnforeseenLossError, match="a new term"):
        narrow.read(more)  # of other rows, which nobody has compared
    later = learned(added([0, 1]), [added([0]), added([1])], known=narrow)
    assert isinstance(later, LossRules)
    assert later.read(usual).divisors == later.read(more).divisors == (2.0,)


def test_ranks_whose_rows_gave_a_term_two_names_agree_on_both() -> None:
    one = learned(added([0, 2, 0]), [added([0, 2]), added([0])])
    other = learned(added([1, 2, 1]), [added([1, 2]), added([1])])
    rules = agreed(one, [one, other])
    assert rules is not None
    assert rules.read(added([0, 2])).divisors == rules.read(added([1, 2])).divisors == (2.0,)
