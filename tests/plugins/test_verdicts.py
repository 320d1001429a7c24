"""Messages of batches that may not be split have a cause and a remedy, whatever the comparison found."""

import torch

from lightning_memkit.micro_batching.proof import verdicts
from lightning_memkit.micro_batching.proof.comparison import Miss


def test_a_term_that_is_missed_where_gradients_add_up_has_a_cause() -> None:
    """The loss's terms are compared one by one: what one misses, another may make up for."""
    gradient = torch.ones(3, dtype=torch.float64)
    miss = Miss(excess=10.0, relative_error=1.0, parameters=(("weight", 1.0),))
    found = verdicts.missed(gradient, [gradient, gradient], [0.5, 0.5], miss)
    assert not found.adds_up
    assert (
        found.cause == "one of the loss's terms is no mean and no sum over the rows; most in weight (100.0%)"
    )
    assert found.remedy.startswith("keep the batch whole")
