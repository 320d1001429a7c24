"""Loss and gradients of a linear head, chunk by chunk: two small buffers replace the logits.

The logits of some rows at a time give the losses, the gradient of the hidden states and, in float32, the
gradient of the weight, accumulated in place. In half precision such sums would be rounded once a chunk. There
the weight's gradient is computed by columns instead: some of its rows at a time, from the logits of these
vocabulary entries for all tokens, rounded once as in the plain computation. This computes the logits a second
time and needs no float32 copy of the gradient.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

_HALF = (torch.bfloat16, torch.float16)
_LEAST_CHUNK_BYTES = 32 * 2**20
_LEAST_COLUMNS = 256  # narrower products leave a processor's matrix units idle


@dataclass(frozen=True, kw_only=True)
class HeadTerms:
    """The loss terms beside cross-entropy.

    Args:
        label_smoothing: fraction of the target that is spread over the whole vocabulary, 0 to 1.
        z_loss: factor of the squared logarithm of the softmax's denominator, added to each token's loss.
        softcap: logits become `softcap * tanh(logits / softcap)`; None leaves them unchanged.
        scale: factor of the logits, applied first.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing <= 1:
            raise ValueError(f"label_smoothing={self.label_smoothing} is outside [0, 1]; for 10 % write 0.1.")
        if not 0 <= self.z_loss < math.inf:
            raise ValueError(
                f"z_loss={self.z_loss} is no factor of a penalty; write 0 or more, such as 1e-4."
            )
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise ValueError(
                f"softcap={self.softcap} can't bound a logit; write a positive number, or None for no cap."
            )
        if not math.isfinite(self.scale) or self.scale == 0:
            raise ValueError(f"scale={self.scale} leaves no logits; write a finite number other than 0.")


@dataclass(frozen=True, kw_only=True)
class HeadProblem:
    """A linear head and its targets, in the dtype of the matrix products.

    Args:
        hidden: [tokens, features].
        weight: [vocabulary, features].
        bias: [vocabulary], or None.
        labels: int64 [tokens], every one of them in the vocabulary.
        terms: the terms of the loss.
        chunk_bytes: size of the logit buffers; None: a third of the weight in float32, at least 32 MiB.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    terms: HeadTerms
    chunk_bytes: int | None = None

    @property
    def tokens(self) -> int:
        """The number of tokens: rows of the hidden states."""
        return self.hidden.size(0)

    @property
    def vocabulary(self) -> int:
        """The size of the vocabulary: rows of the weight."""
        return self.weight.size(0)

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype of softmax and loss: float32, or float64 for float64."""
        return torch.float32 if self.weight.dtype in _HALF else self.weight.dtype

    @property
    def logits_at_once(self) -> int:
        """How many logits the buffers hold."""
        size = self.sum_dtype.itemsize
        each = size + (self.weight.dtype.itemsize if self.weight.dtype in _HALF else 0)
        each += size if self.terms.softcap is not None else 0
        budget = self.chunk_bytes or max(_LEAST_CHUNK_BYTES, self.weight.numel() * size // 3)
        return budget // each


@dataclass(frozen=True, kw_only=True)
class HeadGradients:
    """Gradients in the problem's dtype; None for those that were not asked for."""

    hidden: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None

    @property
    def any(self) -> bool:
        """Whether any gradient is to be computed."""
        return self.hidden is not None or self.weight is not None or self.bias is not None


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which gradients to compute."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False


def losses_and_gradients(
    problem: HeadProblem, wanted: Wanted, token_weight: Tensor | float = 1.0
) -> tuple[Tensor, HeadGradients]:
    """Each token's loss, and the gradients of the weighted sum of losses; 3 matrix products, 4 in half precision.

    Args:
        problem: the head, its inputs and targets.
        wanted: the gradients to compute; if none, only losses are computed, in one product.
        token_weight: each token's weight in the sum, [tokens], or one number or 0-d tensor for all.

    Returns:
        Losses [tokens] in `problem.sum_dtype`, and the gradients.
    """
    size = _even(problem.tokens, problem.logits_at_once // problem.vocabulary)
    by_columns = wanted.weight and size < problem.tokens and problem.weight.dtype in _HALF
    gradients = _allocated(problem, wanted)
    losses, log_totals = (
        problem.hidden.new_empty(problem.tokens, 1, dtype=problem.sum_dtype) for _ in range(2)
    )
    weights = _column(token_weight, losses) * problem.terms.scale
    by_rows = replace(gradients, weight=None) if by_columns else gradients
    _by_rows(problem, size, weights, (losses, log_totals), by_rows)
    if by_columns and gradients.weight is not None:
        _weight_gradient_by_columns(problem, log_totals, weights, gradients.weight)
    return losses.squeeze(1), gradients


def _by_rows(
    problem: HeadProblem, size: int, weights: Tensor, outputs: tuple[Tensor, Tensor], gradients: HeadGradients
) -> None:
    """Write losses, logarithms of the softmax's sums, and gradients, from the logits of ``size`` tokens at a time."""
    losses, log_totals = outputs
    terms = problem.terms
    buffers = _Buffers(problem, size * problem.vocabulary)
    for rows in slices_of(problem.tokens, size):
        x, slope = buffers.logits(problem.hidden[rows], slice(None))
        labels = problem.labels[rows, None]
        losses[rows], log_totals[rows], totals = _to_exponentials(x, labels, terms)
        if not gradients.any:
            continue
        factors = _factors(weights[rows], log_totals[rows], terms) / totals
        _to_gradient(x, problem, factors, weights[rows], labels, weights[rows])
        if slope is not None:
            x.mul_(slope)
        low = buffers.lowered(x)
        if gradients.bias is not None:
            gradients.bias.add_(x.sum(0))
        if gradients.hidden is not None:
            torch.mm(low, problem.weight, out=gradients.hidden[rows])
        if gradients.weight is not None:
            sums = gradients.weight
            torch.addmm(sums, low.t(), problem.hidden[rows], beta=int(rows.start > 0), out=sums)


def _weight_gradient_by_columns(
    problem: HeadProblem, log_totals: Tensor, weights: Tensor, gradient: Tensor
) -> None:
    """Write the weight's gradient some rows at a time, from these vocabulary entries' logits for all tokens."""
    columns = _even(problem.vocabulary, max(_LEAST_COLUMNS, problem.logits_at_once // problem.tokens))
    buffers = _Buffers(problem, problem.tokens * columns)
    labels = problem.labels[:, None]
    factors = _factors(weights, log_totals, problem.terms)
    for block in slices_of(problem.vocabulary, columns):
        x, slope = buffers.logits(problem.hidden, block)
        x.sub_(log_totals).exp_()
        # A mask instead of a list of the labels within the block, whose length would have to be read from the
        # device.
        within = (labels >= block.start) & (labels < block.stop)
        _to_gradient(x, problem, factors, weights, (labels - block.start) * within, weights * within)
        if slope is not None:
            x.mul_(slope)
        torch.mm(buffers.lowered(x).t(), problem.hidden, out=gradient[block])


def _to_exponentials(x: Tensor, labels: Tensor, terms: HeadTerms) -> tuple[Tensor, Tensor, Tensor]:
    """Turn logits into exponentials in place; returns losses, logarithms of the softmax's sums, and the sums of x."""
    highest = x.amax(1, keepdim=True)
    x.sub_(highest)
    expected = x.gather(1, labels)
    if terms.label_smoothing:
        mean = x.mean(1, keepdim=True)
        expected = (1 - terms.label_smoothing) * expected + terms.label_smoothing * mean
    x.exp_()
    totals = x.sum(1, keepdim=True)
    # The logarithm of a sum that contains a 1, minus a logit relative to the highest: no cancellation of
    # large terms.
    losses = totals.log() - expected
    log_totals = totals.log() + highest
    if terms.z_loss:
        losses = losses + terms.z_loss * log_totals.square()
    return losses, log_totals, totals


def _factors(weights: Tensor, log_totals: Tensor, terms: HeadTerms) -> Tensor:
    """The factor of a token's probabilities in the gradient of its logits."""
    return weights * (1 + 2 * terms.z_loss * log_totals) if terms.z_loss else weights


def _to_gradient(
    x: Tensor, problem: HeadProblem, factors: Tensor, weights: Tensor, targets: Tensor, target_weights: Tensor
) -> None:
    """Turn exponentials into the gradient of the (capped) logits, in place; all other tensors are [rows, 1]."""
    smoothing = problem.terms.label_smoothing
    x.mul_(factors)
    if smoothing:
        x.sub_(weights * (smoothing / problem.vocabulary))
    x.scatter_(1, targets, x.gather(1, targets) - (1 - smoothing) * target_weights)


class _Buffers:
    """Memory for a chunk of logits, reused by every chunk of a pass."""

    def __init__(self, problem: HeadProblem, logits: int) -> None:
        self._problem = problem
        self._full = problem.hidden.new_empty(logits, dtype=problem.sum_dtype)
        low = problem.weight.dtype != problem.sum_dtype
        self._low = problem.hidden.new_empty(logits, dtype=problem.weight.dtype) if low else None
        self._slope = None if problem.terms.softcap is None else torch.empty_like(self._full)

    def logits(self, hidden: Tensor, columns: slice) -> tuple[Tensor, Tensor | None]:
        """Logits of some rows and columns, scaled and capped, and the cap's derivative; both lie in the buffers."""
        problem = self._problem
        weight = problem.weight[columns]
        shape = (hidden.size(0), weight.size(0))
        full = _view(self._full, shape)
        target = full if self._low is None else _view(self._low, shape)
        if problem.bias is None:
            torch.mm(hidden, weight.t(), out=target)
        else:
            torch.addmm(problem.bias[columns], hidden, weight.t(), out=target)
        if target is not full:
            full.copy_(target)
        if problem.terms.scale != 1:
            full.mul_(problem.terms.scale)
        if self._slope is None or problem.terms.softcap is None:
            return full, None
        full.div_(problem.terms.softcap).tanh_()
        slope = torch.mul(full, full, out=_view(self._slope, shape)).neg_().add_(1)
        return full.mul_(problem.terms.softcap), slope

    def lowered(self, x: Tensor) -> Tensor:
        """The values in the dtype of the matrix products."""
        return x if self._low is None else _view(self._low, x.shape).copy_(x)


def _allocated(problem: HeadProblem, wanted: Wanted) -> HeadGradients:
    make = torch.empty_like if problem.tokens else torch.zeros_like
    bias = problem.weight.new_zeros(problem.vocabulary, dtype=problem.sum_dtype)
    return HeadGradients(
        hidden=make(problem.hidden) if wanted.hidden else None,
        weight=make(problem.weight) if wanted.weight else None,
        bias=bias if wanted.bias else None,
    )


def _column(values: Tensor | float, like: Tensor) -> Tensor:
    """The values, one per token or one for all, as [tokens, 1]."""
    if not isinstance(values, Tensor):
        return torch.full_like(like, values)  # made there: a copy from the host would wait for the device
    values = values.to(like)
    return values[:, None] if values.ndim else values.expand_as(like)


def _view(buffer: Tensor, shape: tuple[int, ...]) -> Tensor:
    return buffer[: math.prod(shape)].view(shape)


def _even(total: int, most: int) -> int:
    """The size of the fewest chunks of at most ``most`` that cover ``total``, as even as possible; at least 1."""
    parts = math.ceil(total / max(1, most))
    return max(1, math.ceil(total / max(1, parts)))


def slices_of(total: int, size: int) -> Iterator[slice]:
    """Runs of so many tokens or columns, one after the other; the last may be shorter."""
    return (slice(start, min(start + size, total)) for start in range(0, total, size))
