"""What is reported of a batch that ran in micro-batches."""

import torch

from lightning_memkit.micro_batching.parts.attempt import Attempt, put_together


def test_a_loss_is_not_put_together_from_the_terms_of_some_micro_batches() -> None:
    one = torch.ones(())
    assert put_together(Attempt(losses=[one, one], contributions=[one, one])) == 2
    assert put_together(Attempt(losses=[one, one], contributions=[one])) is None
    assert put_together(Attempt(losses=[one, one], contributions=[one, None])) is None
