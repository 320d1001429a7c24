"""What a step on fake tensors may ask for: values that follow from integers, and healthy ones for the rest."""

import pytest
import torch

from lightning_memkit.prediction.simulation import Simulation
from lightning_memkit.utilities.errors import PredictionError

IDS = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
HIDDEN = torch.randn(2, 4, 8)


def ask(function, *tensors):
    """What a function of fake tensors gives, and what was assumed."""
    with Simulation() as simulation:
        given = [simulation.fakes.twin(each) if each.is_floating_point() else each for each in tensors]
        out = function(*given)
        if isinstance(out, torch.Tensor):
            out = tuple(out.shape)
        return out, simulation.values.assumed


# The oracle is the same function of the real tensors.
FROM_INTEGERS = [
    lambda ids: int(ids.max()),
    lambda ids: ids.tolist(),
    lambda ids: bool((ids == 9).any()),
    lambda ids: (ids > 3).nonzero(),
    lambda ids: ids[ids > 3],
    lambda ids: torch.unique(ids),
    lambda ids: torch.arange(int(ids.sum())).repeat_interleave(2),
    lambda ids: ids.cumsum(-1).t().contiguous()[1:].diff(dim=0).min().item(),
    lambda ids: torch.equal(ids, ids.clone()),
    lambda ids: ids.clone().masked_fill_(ids == 1, 0).sum().item(),
    lambda ids: torch.bincount(ids.flatten()),
    lambda ids: ids.clone().view(4, 2).fill_(7).sum().item(),
    lambda ids: torch.zeros(3, dtype=torch.int64).scatter_add_(0, ids.flatten() % 3, ids.flatten()).tolist(),
]


@pytest.mark.parametrize("function", FROM_INTEGERS)
def test_what_follows_from_integers_is_known(function):
    real = function(IDS)
    expected = tuple(real.shape) if isinstance(real, torch.Tensor) else real
    assert ask(function, IDS) == (expected, {})


def test_rows_are_chosen_by_a_known_mask():
    assert ask(lambda hidden, mask: hidden[mask.bool()], HIDDEN, MASK)[0] == (7, 8)
    assert ask(lambda hidden, mask: hidden.masked_select(mask.bool()[..., None]), HIDDEN, MASK)[0] == (56,)


def test_a_written_tensor_is_no_longer_known():
    def function(ids, hidden):
        scores = ids.clone()
        rows = scores[1]
        scores.copy_(hidden.sum(-1))  # other values, by floating-point ones
        return rows.sum().item()

    with pytest.raises(PredictionError, match=r"test_known_values.py:\d+"):
        ask(function, IDS, HIDDEN)


def test_a_healthy_step_is_assumed_where_values_are_not_known():
    def function(hidden):
        loss = hidden.mean()
        assert loss.isfinite()
        assert loss.isfinite().all()
        assert not loss.isnan().any()
        assert loss.item() == 1.0
        assert not torch.isinf(hidden).any()
        return True

    assert ask(function, HIDDEN) == (True, {})


def test_masks_of_numbers_keep_all_and_it_is_said():
    shape, assumed = ask(lambda hidden: hidden[hidden > 0], HIDDEN)
    assert shape == (64,)
    assert [where.startswith("tests/prediction/test_known_values.py:") for where in assumed.values()] == [
        True
    ]


def test_experts_get_equal_shares():
    def function(hidden):
        scores, chosen = hidden.softmax(-1).topk(2, dim=-1)
        counts = torch.bincount(chosen.flatten(), minlength=8)
        assert (chosen[..., 0] != chosen[..., 1]).all()
        return counts.tolist()

    counts, assumed = ask(function, HIDDEN)
    assert counts == [2] * 8
    assert len(assumed) == 1


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_choices_along_any_dimension_are_indices_of_it(dim):
    def function(hidden):
        return (
            hidden.argmax(dim).max().item(),
            tuple(hidden.argmax(dim).shape),
            hidden.sort(dim)[1].max().item(),
        )

    (best, shape, last), _ = ask(function, HIDDEN)
    assert best < HIDDEN.shape[dim]
    assert last == HIDDEN.shape[dim] - 1
    assert shape == tuple(HIDDEN.argmax(dim).shape)


def test_an_integer_that_only_training_knows_is_refused_with_its_line():
    with pytest.raises(PredictionError, match=r"integer at tests/prediction/test_known_values.py:\d+"):
        ask(lambda hidden: int((hidden * 10).long().max()), HIDDEN)


def test_random_numbers_are_not_known():
    def function():
        return torch.randint(0, 5, (3,)).max().item()

    with pytest.raises(PredictionError, match="integer"):
        ask(function)


def test_what_is_large_is_not_followed():
    large = torch.zeros(2**22, dtype=torch.int64)
    assert ask(lambda ids: bool((ids == 1).all()), large)[0] is True  # a healthy step: not looked at
