"""Numbers of a batch that foretell a divisor, until they foretell wrongly."""

import torch

from lightning_memkit.micro_batching.shares.batch_counts import BatchCount, Foretelling, Foretold, Shown


def part(*numbers: int) -> dict[str, torch.Tensor]:
    return {"y": torch.tensor(numbers)}


def nonzero() -> Foretelling:
    foretelling = Foretelling([[Foretold(BatchCount("nonzero", "['y']"), 1.0)]])
    for _ in range(3):  # batches whose totals were looked up
        foretelling.confirm(0, part(1, 0), 1.0)
    return foretelling


def test_a_divisor_of_one_counts_what_foretells_it() -> None:
    foretelling = nonzero()
    assert foretelling.count_of(0, part(0, 0), 1.0) == 0
    assert foretelling.count_of(0, part(0, 3), 1.0) == 1


def test_a_number_that_is_not_what_a_term_counts_is_forgotten() -> None:
    foretelling = nonzero()
    assert foretelling.count_of(0, part(2, 3), 1.0) is None
    assert foretelling.ways == [[]]
    assert foretelling.count_of(0, part(0, 0), 1.0) is None


def test_a_number_tells_nothing_of_divisors_of_one_before_totals_have_confirmed_it() -> None:
    foretelling = Foretelling([[Foretold(BatchCount("nonzero", "['y']"), 1.0)]])
    assert foretelling.count_of(0, part(0, 0), 1.0) is None
    assert foretelling.total(0, part(0, 3)) == 1


def test_a_term_of_zero_counts_once_three_looks_have_shown_it_and_none_the_contrary() -> None:
    foretelling = Foretelling([[]])
    for _ in range(3):
        assert foretelling.doubts(0, 1, is_zero=True)
        foretelling.confirm_zeros(0, Shown.OWN)
    assert not foretelling.doubts(0, 1, is_zero=True)
    foretelling.confirm_zeros(0, Shown.KEPT)
    assert foretelling.doubts(0, 1, is_zero=True)
    assert not foretelling.doubts(0, 0, is_zero=True)


def test_once_a_look_has_shown_a_clamped_divisor_only_an_empty_term_of_zero_is_believed() -> None:
    foretelling = nonzero()
    assert not foretelling.doubts(0, 1, is_zero=False)
    foretelling.confirm(0, part(0, 3), 1.0, Shown.KEPT)
    assert foretelling.doubts(0, 1, is_zero=False)
    assert foretelling.doubts(0, 0, is_zero=False)
    assert not foretelling.doubts(0, 0, is_zero=True)


def test_new_values_take_three_more_looks() -> None:
    foretelling = nonzero()
    foretelling.distrust()
    for _ in range(3):
        assert foretelling.count_of(0, part(0, 3), 1.0) is None
        foretelling.confirm(0, part(0, 3), 1.0)
    assert foretelling.count_of(0, part(0, 3), 1.0) == 1
