"""The parts of a batch weighted by hand: what rounding by parts costs, without memkit.

A sum over rows that cancels is rounded once where the batch runs whole, and part by part where it is split: in
bfloat16 that may differ by many times what another rounding of the whole costs. Here a step runs its parts by itself,
with the weights that give the whole's gradient in float64, by least squares. What such a run is off by, a right split
may be off by, too. So it is where parts are weighed by the first of them, and gradients are brought to the batch's
scale once it has run: all is rounded on another scale.
"""

import sys
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils._pytree import tree_map

from benchmarks._exactness_models import Case, rows_of
from benchmarks._exactness_runs import Trace, train

# In pure bf16 one backward adds parts up in bfloat16, where memkit does so in float32: such a run tells how the loss
# is rounded, and not how gradients are.
ADDS_IN_FLOAT32, ADDS_IN_BFLOAT16 = ("float32", "bf16-mixed", "lora"), "pure-bf16"
_REFERENCE = "_weight_of_the_first_part"
# Of the gradient's norm, where the loss is taken in float64 and in float32.
_SAME, _SAME_IN_FLOAT32 = 1e-9, 1e-6


class NotByHandError(ValueError):
    """The step is no weighted sum of its parts, or its batch is not sliced by rows."""


class _BroughtToScale(Callback):
    """Multiplies a batch's gradients with the weight of the part that its parts were weighed by."""

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Before they are clipped."""
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(vars(pl_module).get(_REFERENCE, 1.0))


def train_by_hand(
    case: Case,
    seed: int,
    dtype: str,
    size: int | Callable[[int], int],
    only: Container[int] = range(sys.maxsize),
    *,
    relative: bool = False,
) -> Trace | None:
    """The unsplit run of the case whose step adds up parts of `size` rows; None where these don't add up.

    Args:
        case: what is trained.
        seed: of data and weights.
        dtype: in what.
        size: rows of a part, or what gives them for the number of a batch, over all epochs.
        only: the batches, over all epochs, that are taken apart.
        relative: parts are weighed by the first of them, and gradients are brought to scale before the step.
    """
    if relative and (dtype == ADDS_IN_BFLOAT16 or case.trainer.get("accumulate_grad_batches", 1) > 1):
        return None
    if dtype not in (*ADDS_IN_FLOAT32, ADDS_IN_BFLOAT16):
        return None
    module = partial(_split_by_hand, case, size, only, relative)
    trace = train(replace(case, module=module), seed, dtype, *([_BroughtToScale()] if relative else []))
    return trace if trace.error is None else None  # the cell then stays what it is


def _split_by_hand(
    case: Case, size: int | Callable[[int], int], only: Container[int], relative: bool
) -> LightningModule:
    module = case.module()
    whole, steps = module.training_step, count()

    def training_step(batch: Any, batch_idx: int) -> Any:
        vars(module)[_REFERENCE] = 1.0
        number = next(steps)
        if number not in only:
            return whole(batch, batch_idx)
        parts = list(_parts_of(batch, size(number) if callable(size) else size))
        same = _SAME_IN_FLOAT32 if case.float32_loss else _SAME
        weights = _weights(module, partial(whole, batch_idx=batch_idx), batch, parts, same)
        if relative:
            reference = next((weight for weight in weights if weight), 1.0)
            vars(module)[_REFERENCE], weights = reference, [weight / reference for weight in weights]
        total: Any = 0.0
        for part, weight in zip(parts, weights, strict=True):
            torch.clear_autocast_cache()  # one cast for all parts would add their gradients in bfloat16
            if weight:
                total = total + weight * _loss_of(whole(part, batch_idx))
        return total

    module.training_step = training_step
    return module


def _parts_of(batch: Any, size: int) -> Iterator[Any]:
    rows = rows_of(batch)

    def sliced(value: Any, start: int) -> Any:
        if not isinstance(value, Tensor) or not value.ndim or len(value) != rows:
            raise NotByHandError("a batch holds something else than tensors with a row a sample")
        return value[start : start + size].clone()  # a step may write into its batch

    for start in range(0, rows, size):
        yield tree_map(partial(sliced, start=start), batch)


def _weights(module: LightningModule, step: Any, batch: Any, parts: list[Any], same: float) -> list[float]:
    """Those with which the parts' gradients add up to the whole's, in float64."""
    with _in_float64(module):
        whole = _gradient(module, step, batch)
        of_parts = torch.stack([_gradient(module, step, part) for part in parts], 1)
    weights = torch.linalg.lstsq(of_parts, whole[:, None], driver="gelsd").solution[:, 0]
    if (of_parts @ weights - whole).norm() > same * whole.norm():
        raise NotByHandError("no weights of the parts give the whole's gradient")
    return weights.tolist()


def _gradient(module: LightningModule, step: Any, batch: Any) -> Tensor:
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    widened = tree_map(lambda v: v.to(torch.float64 if v.is_floating_point() else v.dtype, copy=True), batch)
    loss = _loss_of(step(widened))
    found = torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)
    gradient = torch.cat([one.flatten() for one in found])
    # Of a part in which nothing counts it is nan.
    return gradient if gradient.isfinite().all() else torch.zeros_like(gradient)


@contextmanager
def _in_float64(module: LightningModule) -> Iterator[None]:
    held = [*module.parameters(), *module.buffers()]
    before = [tensor.data for tensor in held]
    with torch.random.fork_rng(devices=()), torch.autocast("cpu", enabled=False):
        for tensor in held:
            tensor.data = tensor.data.double() if tensor.is_floating_point() else tensor.data.clone()
        try:
            yield
        finally:
            for tensor, value in zip(held, before, strict=True):
                tensor.data = value


def _loss_of(output: Any) -> Tensor:
    return output["loss"] if isinstance(output, dict) else output
