"""`predict_memory` for the card that is here, against what its allocator says of the same run."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memkit import (
    ActivationCheckpointing,
    ActivationOffload,
    Budget,
    PureBF16Precision,
    predict_memory,
)
from lightning_memkit.prediction.result import Prediction
from tests.gpu.card import needs_cuda, on_cpu, script, sized
from tests.gpu.models import Language, batches, small, tokens
from tests.gpu.runs import fit
from tests.plugins.noise import NOISE

pytestmark = [pytest.mark.gpu, *NOISE]
ROWS, LENGTH = 8, 64
CASES: dict[str, Any] = {
    "float32": dict,
    "bf16-mixed": lambda: {"precision": "bf16-mixed"},
    "bf16-true": lambda: {"precision": "bf16-true"},
    "pure bf16": lambda: {"plugins": PureBF16Precision()},
    "checkpointed": lambda: {"precision": "bf16-mixed", "callbacks": [ActivationCheckpointing("full")]},
    "selective": lambda: {"precision": "bf16-mixed", "callbacks": [ActivationCheckpointing("selective")]},
    "offloaded": lambda: {"precision": "bf16-mixed", "callbacks": [ActivationOffload()]},
    "accumulated": lambda: {"precision": "bf16-mixed", "accumulate_grad_batches": 2},
    "clipped": lambda: {"precision": "bf16-mixed", "gradient_clip_val": 0.5},
}


def predicted(**options: Any) -> Prediction:
    target = Budget("auto", "auto").target()
    batch = {"ids": tokens(ROWS, sized(1024, LENGTH))}
    return predict_memory(Language(small), batch, trainer=options, device=target or "cpu")


@pytest.mark.filterwarnings("ignore:ActivationOffload does nothing on cpu")
@pytest.mark.parametrize("case", CASES)
def test_what_is_predicted_is_allocated_and_reserved(device: torch.device, case: str) -> None:
    foretold = predicted(**CASES[case]())
    assert foretold.peak_bytes > 0
    options = CASES[case]()
    callbacks = options.pop("callbacks", [])
    others = (0, 0) if on_cpu() else (torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device))
    steps = 4 * options.get("accumulate_grad_batches", 1)
    fit(*callbacks, data=batches(steps, ROWS, sized(1024, LENGTH)), steps=4, **options)
    needs_cuda("the CPU has no allocator that counts")
    allocated = torch.cuda.max_memory_allocated(device) - others[0]
    assert foretold.allocated_bytes == pytest.approx(allocated, rel=0.03)
    reserved = torch.cuda.max_memory_reserved(device) - others[1]
    assert foretold.reserved_bytes == pytest.approx(reserved, rel=0.08)


def test_a_prediction_leaves_the_card_as_it_was(device: torch.device) -> None:
    """Also after a backward on it, when no fork can predict."""
    weight = torch.ones(8, 8, device=device, requires_grad=True)
    (weight @ weight).sum().backward()
    before = 0 if device.type == "cpu" else torch.cuda.memory_allocated(device)
    assert predicted().peak_bytes > 0
    needs_cuda("the CPU has no allocator that counts")
    assert torch.cuda.memory_allocated(device) == before


@pytest.mark.usefixtures("device")
def test_a_fork_predicts_where_cuda_is_in_use_and_no_backward_has_run(tmp_path: Path) -> None:
    found = script("forked", "predict_memory", str(tmp_path))
    assert found["forks"] == ["ended", "ended"]
    assert found["predicted"] == 2 * [predicted().peak_bytes]
