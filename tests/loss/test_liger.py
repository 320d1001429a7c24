"""How Liger's kernel is called: with the weight's gradient summed in float32, where its version offers that."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from lightning_memkit.loss import backends, linear_cross_entropy


class StandIn:
    """Liger's function by its definition; sums the weight's gradient in rows, in the dtype that it is told."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def older(
        self, input: Any, weight: Any, target: Any, bias: Any = None, ce_weight: Any = None,
        ignore_index: int = -100, lse_square_scale: float = 0.0, label_smoothing: float = 0.0,
        reduction: str = "mean", softcap: float | None = None,
    ) -> Any:  # fmt: skip
        return self._loss(input, weight, target, reduction, {"softcap": softcap})

    def newer(
        self, input: Any, weight: Any, target: Any, bias: Any = None, ce_weight: Any = None,
        ignore_index: int = -100, lse_square_scale: float = 0.0, label_smoothing: float = 0.0,
        reduction: str = "mean", softcap: float | None = None, accum_dtype: torch.dtype | None = None,
    ) -> Any:  # fmt: skip
        return self._loss(input, weight, target, reduction, {"softcap": softcap, "accum_dtype": accum_dtype})

    def _loss(self, input: Any, weight: Any, target: Any, reduction: str, told: dict[str, Any]) -> Any:
        self.calls.append(told)
        weight = SummedInRows.apply(weight, told.get("accum_dtype") or weight.dtype, len(input))
        logits = torch.einsum("nf,nvf->nv", input.float(), weight.float())
        return F.cross_entropy(logits, target, reduction=reduction)


class SummedInRows(torch.autograd.Function):
    """A weight for each row, whose gradients are added one by one."""

    @staticmethod
    def forward(ctx: Any, weight: Any, dtype: torch.dtype, rows: int) -> Any:
        ctx.dtypes = (weight.dtype, dtype)
        return weight.expand(rows, *weight.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        own, dtype = ctx.dtypes
        total = torch.zeros_like(grads[0][0], dtype=dtype)
        for grad in grads[0]:
            total += grad.to(dtype)
        return total.to(own), None, None


@pytest.fixture
def liger(monkeypatch, proofs_forgotten):
    """A stand-in package `liger_kernel`, in the version that is asked for."""
    stand_in = StandIn()
    package, transformers, functional = (
        ModuleType(name) for name in ("liger_kernel", "liger_kernel.transformers", "functional")
    )
    transformers.functional = functional  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "liger_kernel", package)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", transformers)
    monkeypatch.setattr(backends, "_importable", lambda module: module == "liger_kernel")

    def of_version(name: str) -> StandIn:
        functional.liger_fused_linear_cross_entropy = getattr(stand_in, name)  # type: ignore[attr-defined]
        return stand_in

    return of_version


def given(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(6, 8).to(dtype), torch.randn(10, 8).to(dtype), torch.randint(10, (6,))


def test_gradients_are_summed_in_float32_and_bfloat16_passes_the_proof(liger):
    stand_in = liger("newer")
    hidden, weight, labels = given(torch.bfloat16)
    found = linear_cross_entropy(hidden, weight, labels, backend="liger")
    assert torch.isfinite(found)
    assert [call["accum_dtype"] for call in stand_in.calls] == [torch.float32] * 2  # the proof, and the call


def test_a_version_that_can_not_is_called_without_and_refused_in_bfloat16(liger):
    stand_in = liger("older")
    hidden, weight, labels = given(torch.float32)
    ours = linear_cross_entropy(hidden, weight, labels)
    torch.testing.assert_close(linear_cross_entropy(hidden, weight, labels, backend="liger"), ours)
    assert all("accum_dtype" not in call for call in stand_in.calls)
    hidden, weight, labels = given(torch.bfloat16)
    with pytest.raises(ValueError, match="weight's gradient was off by"):
        linear_cross_entropy(hidden, weight, labels, backend="liger")
