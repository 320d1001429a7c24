"""The contamination probe over the card's own kernels: clean batches pass, and a planted leak is named."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_memkit import packed_attention
from lightning_memkit.attention.contamination import ContaminationError, probe_contamination
from lightning_memkit.data.batching.batch import PackedBatch
from tests.gpu.card import on_cpu
from tests.plugins.test_contamination import batch_of
from tests.plugins.test_contamination import leaking as whole_rows
from tests.plugins.test_contamination import model as language_model

pytestmark = [
    pytest.mark.gpu,
]
BACKENDS = ["varlen", "flex", "loop"]


def packed(device: torch.device) -> PackedBatch:
    rows = [[9, 30, 17, 8], [25, 5, 22, 12], [40, 7, 10, 7]]
    batch = batch_of(rows, np.random.default_rng(0))
    return PackedBatch({name: v.to(device) if isinstance(v, Tensor) else v for name, v in batch.items()})


def attention(backend: str) -> Any:
    """On the CPU the loop stands for the others."""

    def attend(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        chosen: Any = "loop" if on_cpu() else backend
        return packed_attention(query, key, value, cu_seqlens, backend=chosen)

    return attend


def one_boundary_missed(backend: str) -> Any:
    """The second document sees the first one."""
    attend = attention(backend)

    def leak(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor) -> Tensor:
        return attend(query, key, value, torch.cat((cu_seqlens[:1], cu_seqlens[2:])))

    return leak


def model(device: torch.device, attend: Any) -> Any:
    # Its heads are as wide as the kernels want them, and its weights so large that a leak is no rounding.
    built: Any = language_model(attend).to(device, torch.bfloat16)
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    return built


def run(tested: Any) -> Any:
    """Its forward alone, whose modules' outputs the probe watches."""
    return lambda part: tested(part["input_ids"], part["position_ids"], part["cu_seqlens"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_documents_kept_apart_pass_and_one_missed_boundary_is_found(
    device: torch.device, backend: str
) -> None:
    batch = packed(device)
    clean = model(device, attention(backend))
    assert probe_contamination(clean, batch, run(clean))
    leaky = model(device, one_boundary_missed(backend))
    with pytest.raises(ContaminationError, match="change with other documents"):
        probe_contamination(leaky, batch, run(leaky))


def test_whole_rows_are_found(device: torch.device) -> None:
    leaky = model(device, whole_rows)
    with pytest.raises(ContaminationError, match="change with other documents"):
        probe_contamination(leaky, packed(device), run(leaky))
