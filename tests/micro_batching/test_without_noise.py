"""Which numbers of a step count as drawn, and how micro-batches get those of their rows."""

import torch
from torch.nn import functional as F

from lightning_memkit.micro_batching.proof.without_noise import SharedDraws


def test_attention_without_dropout_draws_nothing() -> None:
    """Its kernel has the tag of random operators, and here 7 queries, which are no multiple of 5 rows."""
    q = torch.randn(1, 2, 7, 16)
    with SharedDraws() as draws:
        draws.record()
        F.scaled_dot_product_attention(q, q, q)
        torch.rand(10)
    assert not draws.has_draws_without_rows(5)


def test_a_number_for_all_rows_is_told_also_where_the_generator_is_the_user_s() -> None:
    own = torch.Generator().manual_seed(0)
    for generator in (None, own):
        with SharedDraws() as draws:
            draws.record()
            torch.rand(5, generator=generator)
            assert not draws.has_draws_without_rows(5)
            torch.rand((), generator=generator)
        assert draws.has_draws_without_rows(5)


def test_micro_batches_get_the_numbers_of_their_rows_beside_attention() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        attended = F.scaled_dot_product_attention(x, x, x)
        return attended * torch.rand(len(x), 1, 1, 1)

    x = torch.randn(5, 2, 7, 16)
    with SharedDraws() as draws:
        draws.record()
        whole = step(x)
        for first, rows in ((0, 2), (2, 3)):
            draws.hand_out(first, rows, 5)
            torch.testing.assert_close(step(x[first : first + rows]), whole[first : first + rows])
    assert draws.complete
