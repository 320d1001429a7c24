"""Numbers of a batch that foretell a divisor, until they foretell wrongly."""

import torch

from lightning_memkit.micro_batching.batch_counts import BatchCount, Foretelling, Foretold


def part(*numbers: int) -> dict[str, torch.Tensor]:
    return {"y": torch.tensor(numbers)}


def nonzero() -> Foretelling:
    return Foretelling([[Foretold(BatchCount("nonzero"), 1.0)]])


def test_a_divisor_of_one_does_not_count_where_nothing_that_foretells_it_is_held() -> None:
    foretelling = nonzero()
    assert foretelling.holds_none(0, part(0, 0), 1.0) is True
    assert foretelling.holds_none(0, part(0, 3), 1.0) is False


def test_a_number_that_is_not_what_a_term_counts_is_forgotten() -> None:
    foretelling = nonzero()
    assert foretelling.holds_none(0, part(2, 3), 1.0) is None
    assert foretelling.ways == [[]]
    assert foretelling.holds_none(0, part(0, 0), 1.0) is False


def test_a_term_that_is_nothing_where_it_counts_nothing_has_no_divisor_that_does_not_count() -> None:
    foretelling = nonzero()
    assert foretelling.holds_none(0, part(0, 0), 1.0) is True
    assert foretelling.is_misread_by(0)
    assert foretelling.holds_none(0, part(0, 0), 1.0) is False
    assert not foretelling.is_misread_by(0)
