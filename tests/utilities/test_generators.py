"""Random number generators, saved, restored, and told apart."""

import pytest
import torch

from lightning_memkit.utilities.generators import another_seed


@pytest.mark.parametrize("seed", [0, 1, 42])
def test_another_seed_draws_other_numbers_and_none_by_itself(seed: int) -> None:
    torch.manual_seed(seed)
    before = torch.get_rng_state()
    other = another_seed()
    assert torch.equal(torch.get_rng_state(), before)
    drawn = torch.rand(4)
    assert not torch.equal(torch.manual_seed(other).get_state(), before)
    assert not torch.equal(torch.rand(4), drawn)
