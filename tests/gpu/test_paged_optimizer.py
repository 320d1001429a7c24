"""bitsandbytes' paged 8-bit optimizer: resumed bit for bit, and trials leave no pages behind."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_memkit import MemoryBudget, OnDeviceStrategy
from tests.gpu.card import accelerator, needs_cuda, needs_package, on_cpu
from tests.gpu.models import Decoder, Language, batches
from tests.plugins.noise import NOISE
from tests.plugins.toys import trainer

pytestmark = [
    pytest.mark.gpu,
    *NOISE,
    pytest.mark.filterwarnings("ignore:.*nothing is paged"),
]


@pytest.fixture
def bnb() -> Any:
    """Asked for here: a module that is skipped as a whole would be a line of its own where there is no card."""
    return needs_package("bitsandbytes")


class Paged(Language):
    def __init__(self) -> None:
        super().__init__(lambda: Decoder(1024, 256, 2, 2))  # it pages states of 100,000 elements and more

    def configure_optimizers(self) -> Any:
        import bitsandbytes

        return bitsandbytes.optim.PagedAdamW8bit(self.parameters(), lr=1e-3)


def train(module: Language, *callbacks: Any, epochs: int = 1, ckpt_path: Path | None = None) -> Any:
    """By epochs: a run that ends by its steps at an epoch's end is resumed by Lightning with another batch."""
    # Under memkit's strategy embeddings keep states of 32 bits, and loaded states get pages again.
    strategy = OnDeviceStrategy(accelerator())
    fitted = trainer(*callbacks, max_steps=-1, max_epochs=epochs, accelerator="auto", strategy=strategy)
    torch.manual_seed(1)
    fitted.fit(module, batches(4), ckpt_path=ckpt_path)
    return fitted


def tensors(module: Language) -> list[Tensor]:
    found = [parameter.detach().cpu() for parameter in module.parameters()]
    for state in module.trainer.optimizers[0].state.values():
        found += [state[name].cpu() for name in sorted(state) if isinstance(state[name], Tensor)]
    return found


@pytest.mark.usefixtures("device", "deterministic", "bnb")
def test_a_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole = Paged()
    first = copy.deepcopy(whole)
    train(whole, epochs=2)
    train(first).save_checkpoint(tmp_path / "epoch.ckpt")
    resumed = Paged()
    train(resumed, epochs=2, ckpt_path=tmp_path / "epoch.ckpt")
    assert len(tensors(whole)) == len(tensors(resumed)) > 2 * len(list(whole.parameters()))
    assert all(map(torch.equal, tensors(resumed), tensors(whole)))


@pytest.mark.usefixtures("device")
def test_trials_leave_no_pages(bnb: Any) -> None:
    """They make states and take them back; each would be a full set of managed memory that nothing frees."""
    pages = bnb.functional.GlobalPageManager.get_instance().paged_tensors

    def taken(*callbacks: Any) -> int:
        before = len(pages)
        train(Paged(), *callbacks)
        return len(pages) - before

    plain = taken()
    assert (plain == 0) is on_cpu()
    assert taken(MemoryBudget("1GiB", micro_batch_size=4)) == plain
    assert taken(MemoryBudget("1GiB")) == plain


@pytest.mark.usefixtures("device", "bnb")
def test_states_are_paged_after_a_resume(tmp_path: Path) -> None:
    train(Paged()).save_checkpoint(tmp_path / "epoch.ckpt")
    resumed = Paged()
    train(resumed, epochs=2, ckpt_path=tmp_path / "epoch.ckpt")
    needs_cuda("nothing is paged on the CPU")
    states = [state["state1"] for state in resumed.trainer.optimizers[0].state.values() if "state1" in state]
    assert any(getattr(state, "is_paged", False) for state in states)
