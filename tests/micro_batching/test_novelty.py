"""What a batch has that no batch before it had: more or less of a value, more rows."""

import pytest
import torch

from lightning_memkit.micro_batching.proof.novelty import Novelties


def told(*batches: object) -> list[tuple[bool, bool, bool]]:
    """`has_counts`, `has_sums` and `is_larger` after each batch."""
    novelties, found = Novelties(), []
    for batch in batches:
        novelties.are_in(batch)
        found.append((novelties.has_counts, novelties.has_sums, novelties.is_larger))
    return found


@pytest.mark.parametrize(
    ("first", "same", "other"),
    [
        ([0, 1, 2, 2], [2, 0, 2, 1], [2, 2, 2, 1]),  # more of one
        ([0, 1, 2, 2], [1, 2, 0, 2], [0, 1, 1, 2]),  # less of one
        ([0, 0, 1, 1], [1, 0, 0, 1], [0, 0, 1, 3]),  # a value that was not there
    ],
)
def test_a_batch_with_more_or_less_of_a_value_is_told(
    first: list[int], same: list[int], other: list[int]
) -> None:
    found = told(*[{"y": torch.tensor(labels)} for labels in (first, same, other, other)])
    assert found == [(False,) * 3, (False,) * 3, (True, True, False), (False,) * 3]


def test_classes_that_are_told_together_are_told_where_neither_is_by_itself() -> None:
    """More of them in sum than ever: `(y < 2).sum()` may have been clamped so far."""
    labels = [[0, 0, 2, 3], [1, 1, 3, 2], [0, 0, 1, 1]]
    labels[2:2] = [[2, 2, 3, 3], [2, 2, 2, 3]]
    found = told(*[{"y": torch.tensor(one)} for one in labels])
    assert found[-1] == (True, True, False)


def test_more_rows_are_told_and_fewer_are_no_larger_batch() -> None:
    found = told(*[torch.zeros(rows) for rows in (4, 8, 8, 2)])
    assert [larger for _, _, larger in found] == [False, True, False, False]
    assert [counts for counts, _, _ in found] == [False, True, False, True]


def test_a_sum_of_many_floats_is_no_count() -> None:
    weights = torch.linspace(0, 1, 100)
    assert told(weights, 2 * weights, weights) == [(False,) * 3, (False, True, False), (False,) * 3]


def test_ids_of_which_each_batch_has_few_are_not_all_remembered() -> None:
    """Each was kept and sorted in every batch."""
    novelties = Novelties()
    for batch in range(100):
        novelties.are_in({"user": torch.arange(8 * batch, 8 * batch + 8)})
    assert max(map(len, novelties._values_of.values())) <= 64 + 8
    assert len(novelties._ranges) <= 2 * (64 + 8) + 2
    assert not novelties.has_counts
