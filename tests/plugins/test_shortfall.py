"""What a budget that is too small says: the bytes by which a remedy lowers the peak, not those of what it touches."""

import pytest
import torch
from torch import nn

from lightning_memkit import MemoryBudget
from lightning_memkit.micro_batching.sizes.shortfall import Needs, shortfall
from lightning_memkit.micro_batching.sizes.sizing import BudgetError
from tests.plugins.toys import TokenTagger, loader, trainer

MIB = 2**20


def needs(**changes) -> Needs:
    known = {
        "weights": 10 * MIB, "gradients": 10 * MIB, "states": 20 * MIB, "part_peak": 50 * MIB,
        "step_peak": 70 * MIB, "float32": True, "checkpointed": False,
    }  # fmt: skip
    return Needs(**{**known, **changes})


def test_a_phase_below_the_other_s_peak_is_no_remedy():
    text = shortfall(needs(fusable=True), 1, 32 * MIB)
    assert "fused=True" in text
    assert "ActivationCheckpointing" not in text


def test_what_one_phase_saves_ends_at_the_other_s_peak():
    # 30 MiB of temporaries go, but forward and backward still need 50 of the 70.
    assert "(fused=True): up to 20.00 MiB" in shortfall(needs(fusable=True), 1, 32 * MIB)


def test_states_lie_in_both_phases():
    text = shortfall(needs(offloadable=True), 1, 32 * MIB)
    assert "OptimizerOffload (states in host memory): up to 20.00 MiB" in text


def test_checkpointing_is_a_remedy_where_activations_are_the_peak():
    text = shortfall(needs(part_peak=90 * MIB, step_peak=60 * MIB), 1, 32 * MIB)
    assert "ActivationCheckpointing (recomputes activations): up to 30.00 MiB" in text
    assert "fused=True" not in text


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.long
def test_one_kernel_is_a_remedy_for_an_optimizer_that_has_it_and_does_not_use_it(fused):
    class Wide(TokenTagger):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(4096, 16)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=fused)

    with pytest.raises(BudgetError) as caught:
        trainer(MemoryBudget("64KiB")).fit(Wide(), loader())
    assert ("fused=True" in str(caught.value)) is not fused
