"""After a fit nothing of memkit holds the memory of the device: models of a next one have all of it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_memkit import (
    ActivationCheckpointing,
    GradientRelease,
    MemoryBudget,
    MemoryReport,
    PureBF16Precision,
)
from tests.gpu.models import Decoder, Language, batches
from tests.plugins.noise import NOISE
from tests.plugins.toys import trainer

pytestmark = NOISE

WAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "budget, split": lambda: {"callbacks": [MemoryBudget("8GiB", micro_batch_size=2)]},
    "budget, whole": lambda: {"callbacks": [MemoryBudget("8GiB")]},
    "checkpointing": lambda: {"callbacks": [ActivationCheckpointing("full")]},
    "release": lambda: {"callbacks": [GradientRelease()]},
    "report": lambda: {"callbacks": [MemoryReport(live=False)]},
    "bfloat16": lambda: {"plugins": [PureBF16Precision()]},
    "bfloat16 and a budget": lambda: {
        "plugins": [PureBF16Precision()], "callbacks": [MemoryBudget("8GiB", micro_batch_size=2)]
    },
}  # fmt: skip


class Validated(Language):
    """A decoder that is validated, too."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))


def tensors_of(module: Any, optimizer: Any) -> list[Tensor]:
    """Weights, gradients and states."""
    found = [*module.parameters(), *module.buffers()]
    found += [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    return found + [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)
    ]


def moved(module: Any, optimizer: Any) -> None:
    """Move all of it, as Lightning moves it to the host after a fit on a card."""
    module._apply(torch.clone)
    for parameter, state in optimizer.state.items():
        optimizer.state[parameter] = apply_to_collection(state, Tensor, torch.clone)


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.long
def test_only_the_module_and_its_optimizer_hold_what_was_trained(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # reports are written where one stands
    given = WAYS[way]()
    module = Validated(partial(Decoder, 64, 32, 3, 2))
    fitted = trainer(
        *given.pop("callbacks", []), max_steps=3, limit_val_batches=2, accelerator="cpu", **given
    )
    fitted.fit(module, batches(3, 8, 16), batches(2, 8, 16))
    held = tensors_of(module, fitted.optimizers[0])
    storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in held]
    del held
    moved(module, fitted.optimizers[0])
    assert sum(not storage.expired() for storage in storages) == 0
