"""The autograd function of a linear head's loss: forward computes the gradients, backward scales them."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_memkit.loss.chunks import (
    HeadGradients,
    HeadProblem,
    HeadTerms,
    Wanted,
    losses_and_gradients,
)


@dataclass(frozen=True, kw_only=True)
class ChunkPlan:
    """The inputs of forward and backward that are not tensors."""

    terms: HeadTerms
    dtype: torch.dtype
    by_token: bool
    chunk_bytes: int | None
    gradients: bool

    @property
    def waits(self) -> bool:
        """Whether gradients need backward's factor first: one a token, or one that prevents float16 underflow."""
        return self.by_token or self.dtype is torch.float16


class LinearCrossEntropy(torch.autograd.Function):
    """Computes gradients in forward for a factor of 1, and multiplies them in backward, once."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        rows: Tensor | None,
        divisor: Tensor | float,
        plan: ChunkPlan,
    ) -> Tensor:
        """The loss of the tokens that count; also computes gradients, unless they need backward's factor.

        `rows` are the places of these tokens, `labels` theirs alone; or a mask of them, `labels` those of all.
        """
        ctx.plan, ctx.divisor = plan, divisor
        ctx.save_for_backward(hidden, weight, bias, labels, rows)
        ctx.gradients = None
        at_once = plan.gradients and not plan.waits
        wanted = _wanted(ctx) if at_once else Wanted()
        share = _reciprocal(divisor, plan.dtype) if labels.numel() else 0.0
        losses, gradients = _run(ctx, wanted, share, (hidden, weight, bias, labels, rows))
        if at_once:
            ctx.gradients = gradients
        return losses if plan.by_token else losses.sum() / divisor

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients times the loss's own; computed here if forward did not or an earlier backward used them."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "linear_cross_entropy has no second derivative, and create_graph=True asks for one; compute this "
                "loss as F.cross_entropy(F.linear(hidden, weight, bias).float(), labels), or leave create_graph out."
            )
        (factor,) = outputs
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:  # not computed in forward, or used up by an earlier backward
            share = factor / ctx.divisor if ctx.saved_tensors[3].numel() else 0.0
            _, gradients = _run(ctx, _wanted(ctx), share, ctx.saved_tensors)
            factor = None
        found = (gradients.hidden, gradients.weight, gradients.bias)
        dtypes = ctx.dtypes
        scaled = [_scaled(value, dtype, factor) for value, dtype in zip(found, dtypes, strict=True)]
        return *scaled, None, None, None, None


def _run(
    ctx: Any, wanted: Wanted, share: Tensor | float, tensors: tuple[Any, ...]
) -> tuple[Tensor, HeadGradients]:
    """Losses and gradients of the tokens that count; the hidden states' gradient has a row for every token."""
    hidden, weight, bias, labels, rows = tensors
    plan: ChunkPlan = ctx.plan
    mask = rows if rows is not None and rows.dtype is torch.bool else None
    rows = rows if mask is None else None
    ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        problem = HeadProblem(
            hidden=(hidden if rows is None else hidden.index_select(0, rows)).to(plan.dtype),
            weight=weight.to(plan.dtype),
            bias=None if bias is None else bias.to(plan.dtype),
            labels=labels,
            terms=plan.terms,
            chunk_bytes=plan.chunk_bytes,
        )
        if mask is not None:
            given = (
                share if isinstance(share, Tensor) else hidden.new_full((), share, dtype=problem.sum_dtype)
            )
            share = torch.where(mask, given, 0)
        losses, gradients = losses_and_gradients(problem, wanted, share)
        losses = losses if mask is None else torch.where(mask, losses, 0)
    if rows is not None and gradients.hidden is not None:
        whole = gradients.hidden.new_zeros(hidden.shape).index_copy_(0, rows, gradients.hidden)
        gradients = replace(gradients, hidden=whole)
    return losses, gradients


def _reciprocal(divisor: Tensor | float, dtype: torch.dtype) -> Tensor | float:
    """One over a count; for an integer tensor torch would compute it in float32, even where all else is float64."""
    if isinstance(divisor, Tensor):
        divisor = divisor.to(torch.float64 if dtype is torch.float64 else torch.float32)
    return 1 / divisor


def _wanted(ctx: Any) -> Wanted:
    hidden, weight, bias = ctx.needs_input_grad[:3]
    return Wanted(hidden=hidden, weight=weight, bias=bias)


def _scaled(gradient: Tensor | None, dtype: torch.dtype, factor: Tensor | None) -> Tensor | None:
    """The gradient in its tensor's dtype times backward's factor, in place; the factor is not rounded first."""
    if gradient is None:
        return None
    gradient = gradient.to(dtype)
    if factor is None:
        return gradient
    known = factor.device.type == "cpu" and not isinstance(factor, FakeTensor)
    if known and not torch.compiler.is_compiling():
        value = float(factor)
        return gradient if value == 1 else gradient.mul_(value)
    # A one-element tensor with dimensions, not a scalar: half precision is multiplied in float32, without
    # synchronizing.
    return torch.mul(gradient, factor.view([1] * gradient.ndim), out=gradient)
