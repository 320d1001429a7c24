"""Judge by gradients whether a loss is the weighted mean of its micro-batches' losses; if not, say why."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_memkit.memory.meter import unmetered

# How far the micro-batches' weighted gradient may be from the whole's, relative to its norm. Rounding stays
# below: in bf16 5 % were seen on a two-layer Llama. A loss that can't be split is off by tens of per cent.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-3, torch.float16: 5e-2, torch.bfloat16: 0.15}
SAMPLED_PER_PARAMETER = 4096


_ROUNDED_PAIR = 0.01  # of a gradient's norm


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether micro-batches add up to the whole batch, how far off they are, and what to do if they don't.

    Args:
        adds_up: the weighted gradient of the micro-batches is the whole batch's, up to rounding.
        relative_error: the distance of the two gradients over the norm of the latter.
        cause: the likely reason of a mismatch; empty if they add up.
        remedy: what to write instead; empty if they add up.
        failure: what the step raised on a micro-batch; its frames hold no tensors.
    """

    adds_up: bool
    relative_error: float
    cause: str = ""
    remedy: str = ""
    failure: Exception | None = None

    @property
    def may_be_rounding(self) -> bool:
        """Whether a miss may be noise that two rows of a deep net are too few to measure."""
        return self.adds_up or self.relative_error < _ROUNDED_PAIR


def sampled_gradient(parameters: Iterable[nn.Parameter]) -> Tensor:
    """4096 to 8191 evenly spaced elements of every parameter's gradient (or all), as one float64 vector on the host.

    A missing gradient counts as zero: a micro-batch may not use a parameter that the whole batch uses. Of a
    sharded parameter this rank's shard is sampled.
    """
    with unmetered():  # a trial's modes make an operator five times as dear
        samples = [_sample(parameter) for parameter in parameters if parameter.requires_grad]
        return torch.cat(samples) if samples else torch.zeros(0, dtype=torch.float64)


def _sample(parameter: nn.Parameter) -> Tensor:
    places = sampled_places(parameter)
    if parameter.grad is None:
        return torch.zeros(len(places), dtype=torch.float64)
    gradient = _local(parameter.grad.detach())
    gradient = gradient.to_dense() if gradient.is_sparse else gradient
    return gradient.flatten()[:: places.step].to("cpu", torch.float64)


def sampled_places(parameter: nn.Parameter) -> range:
    """The indices that `sampled_gradient` takes from a flat parameter, or from this rank's shard of it."""
    count = _local(parameter).numel()
    return range(0, count, max(1, count // SAMPLED_PER_PARAMETER))


def _local(tensor: Tensor) -> Tensor:
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def tolerance(parameters: Iterable[nn.Parameter], *, reduced: bool = False) -> float:
    """The tolerance of the coarsest dtype among the parameters; `reduced`: layers compute in 16 bits or fewer."""
    coarsest = max((TOLERANCE.get(p.dtype, 0.15) for p in parameters if p.requires_grad), default=2e-3)
    return max(coarsest, TOLERANCE[torch.bfloat16]) if reduced else coarsest


def relative_error(whole: Tensor, parts: Sequence[Tensor], weights: Sequence[float]) -> float:
    """The distance of the weighted micro-batches from the whole over the whole's norm; infinite for nan."""
    mixed = torch.zeros_like(whole)
    for part, weight in zip(parts, weights, strict=True):
        mixed += part * weight
    error = float((mixed - whole).norm() / whole.norm().clamp_min(1e-300))
    if float(whole.norm()) == 0:
        error = 0.0 if float(mixed.norm()) == 0 else float("inf")
    return error if error == error else float("inf")


def judge(whole: Tensor, parts: Sequence[Tensor], weights: Sequence[float], allowed: float) -> Verdict:
    """Compare the whole batch's gradient with its micro-batches', and name the likely cause of a mismatch.

    Args:
        whole: the gradient of the whole batch, flat.
        parts: the gradients of each micro-batch's own loss, flat.
        weights: each micro-batch's weight.
        allowed: the largest relative error that counts as rounding; see `tolerance`.
    """
    error = relative_error(whole, parts, weights)
    if error <= allowed:
        return Verdict(adds_up=True, relative_error=error)
    if relative_error(whole, parts, [1.0] * len(parts)) <= allowed:
        return Verdict(
            adds_up=False,
            relative_error=error,
            cause="the loss is a sum over its samples, not a mean: gradients add up without weights",
            remedy='return a mean from training_step, or write weigh_by="sum"',
        )
    fitted = _fitted_weights(whole, parts)
    if relative_error(whole, parts, fitted) <= allowed:
        shares = ", ".join(f"{weight:.3f}" for weight in fitted)
        expected = ", ".join(f"{weight:.3f}" for weight in weights)
        return Verdict(
            adds_up=False,
            relative_error=error,
            cause=f"the loss is a mean over something else: micro-batches weigh {shares}, not {expected}",
            remedy="write weigh_by= as a callable from a micro-batch to what its loss is a mean over",
        )
    return Verdict(
        adds_up=False,
        relative_error=error,
        cause="the samples of a batch act on each other in the loss (contrastive or in-batch negatives, "
        "batch statistics, an auxiliary loss over the batch)",
        remedy="keep the batch whole (micro_batch_size = the loader's batch size; ActivationCheckpointing "
        "helps it to fit), or pass split= so that each micro-batch holds a complete group",
    )


def _fitted_weights(whole: Tensor, parts: Sequence[Tensor]) -> list[float]:
    """The weights that bring the micro-batches' sum closest to the whole, by least squares."""
    matrix = torch.stack(list(parts), dim=1)
    if not bool(torch.isfinite(matrix).all() and torch.isfinite(whole).all()):
        return [1.0 / len(parts)] * len(parts)
    return torch.linalg.lstsq(matrix, whole[:, None]).solution.flatten().tolist()
