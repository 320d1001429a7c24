"""Steps within backward: bitwise the weights of plain training, and never all gradients at once."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightning_memkit import ActivationCheckpointing, GradientRelease, PureBF16Precision
from tests.gpu.card import needs_cuda
from tests.gpu.models import Language, billion
from tests.gpu.runs import fit
from tests.plugins.noise import NOISE

pytestmark = [pytest.mark.gpu, *NOISE]
OPTIONS: dict[str, Any] = {
    "float32": dict,
    "clipped": lambda: {"gradient_clip_val": 0.05},
    "bf16-mixed": lambda: {"precision": "bf16-mixed"},
    "kahan": lambda: {"plugins": [PureBF16Precision()]},
    "stochastic": lambda: {"plugins": [PureBF16Precision("stochastic")]},
}


@pytest.mark.usefixtures("device", "deterministic")
@pytest.mark.parametrize("bundle_bytes", [0, 1 << 20])
@pytest.mark.parametrize("case", OPTIONS)
def test_weights_are_bitwise_those_of_plain_training(case: str, bundle_bytes: int) -> None:
    plain = fit(module=Language(), **OPTIONS[case]())
    ours = fit(GradientRelease(bundle_bytes=bundle_bytes), module=Language(), **OPTIONS[case]())
    assert torch.equal(ours, plain)


class Peak(Callback):
    """Of the allocator in the steps that have the optimizer's states."""

    peak_bytes = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.size = sum(parameter.nbytes for parameter in pl_module.parameters())
        if pl_module.device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated()


@pytest.mark.usefixtures("device")
def test_a_billion_parameters_need_no_room_for_their_gradients() -> None:
    peaks = []
    for callbacks in ([], [GradientRelease()]):
        peak = Peak()
        fit(
            *callbacks,
            ActivationCheckpointing(),
            peak,
            module=Language(billion),
            plugins=[PureBF16Precision()],
        )
        peaks.append(peak.peak_bytes)
    needs_cuda("the allocator's own peak")
    assert peaks[0] - peaks[1] >= 0.7 * peak.size
