"""Compare a batch's gradient with its micro-batches', parameter by parameter, against measured noise."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_memkit.micro_batching.proof.decomposability import sampled_places

SCALE = 0.75  # of the loss, to measure noise: exact in every dtype, and it changes how every product rounds
_NOISES = 8.0  # times the measured noise: the difference that a split may cause
_EPSILONS = {torch.float64: 4.0, torch.float32: 4.0}  # machine epsilons of the gradients' dtype; 1 for others
_BELOW_NOTICE = 1e-2  # of a rounding of the whole gradient: below it, a parameter's gradient is rounding only
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
_HALVED = 64.0  # machine epsilons that halving a loss may change, because kernels add in another order


@dataclass(frozen=True, kw_only=True)
class Span:
    """The range of a parameter's sampled gradient in the flat vector of all."""

    name: str
    start: int
    stop: int
    epsilon: float


def spans_of(module: nn.Module) -> list[Span]:
    """The ranges of all trained parameters' gradients in the vector of `decomposability.sampled_gradient`."""
    spans, start = [], 0
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        count = len(sampled_places(parameter))
        dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
        epsilon = torch.finfo(dtype).eps * _EPSILONS.get(dtype, 1.0) if dtype.is_floating_point else 0.0
        spans.append(Span(name=name, start=start, stop=start + count, epsilon=epsilon))
        start += count
    return spans


@dataclass(frozen=True, kw_only=True)
class Miss:
    """How far micro-batches' gradients are from their batch's.

    Args:
        excess: the largest distance of a parameter's gradient over what noise explains; above 1 they differ.
        relative_error: the distance of all gradients together over their norm.
        parameters: the names of those that differ most, with their own relative distance.
    """

    excess: float
    relative_error: float
    parameters: tuple[tuple[str, float], ...] = ()


class Comparison:
    """Compares gradients with one batch's, whose noise was measured by two runs.

    Attributes:
        level: the noise over the gradient's norm.
        knows_rounding: whether a third run, with the last bits of the weights flipped, has widened the noise.

    Args:
        spans: the range of each parameter.
        whole: the batch's gradient.
        again: the gradient of another run whose loss was scaled by `SCALE`, scaled back: it differs by
            rounding and by kernels that add in another order each time.
    """

    def __init__(self, spans: Sequence[Span], whole: Tensor, again: Tensor) -> None:
        self._spans = spans
        self.whole = whole
        self._norms = _norms(spans, whole)
        self._epsilons = torch.tensor([span.epsilon for span in spans], dtype=torch.float64)
        self._noise = _norms(spans, again - whole)
        self._size = float(whole.norm())
        self._summands = torch.zeros_like(self._norms)
        self._rounding = 0.0
        self.knows_rounding = False
        self.level = float((again - whole).norm() / whole.norm().clamp_min(1e-300))

    def miss(self, gradients: Sequence[Tensor], weights: Sequence[float]) -> Miss:
        """How far the weighted sum of gradients is from the batch's gradient; infinitely for nan."""
        mixed = torch.zeros_like(self.whole)
        scales = self._norms + self._summands
        for gradient, weight in zip(gradients, weights, strict=True):
            if weight:
                mixed += gradient * weight
                scales += _norms(self._spans, gradient) * abs(weight)
        distances = _norms(self._spans, mixed - self.whole)
        epsilons = self._epsilons
        allowed = (
            _NOISES * torch.maximum(self._noise, max(self.level, self._rounding) * scales) + epsilons * scales
        )
        allowed = allowed + epsilons * (_BELOW_NOTICE * self._size) + 1e-300
        excesses = (distances / allowed).nan_to_num(torch.inf, torch.inf)
        relative = distances / torch.maximum(self._norms, scales / 2).clamp_min(1e-300)
        worst = excesses.argsort(descending=True)[:3].tolist()
        norm = max(self._size, float(scales.norm()) / 2, 1e-300)
        error = float((mixed - self.whole).norm()) / norm
        return Miss(
            excess=float(excesses.max()) if len(self._spans) else 0.0,
            relative_error=error if error == error else float("inf"),
            parameters=tuple(
                (self._spans[i].name, float(relative[i])) for i in worst if float(excesses[i]) > 1
            ),
        )

    def sums_up(self, gradient: Tensor) -> None:
        """Allow for the rounding of a summand of the batch's gradient, which may be larger than the sum."""
        self._summands = self._summands + _norms(self._spans, gradient).nan_to_num(0.0)

    def allow(self, rounded: Tensor) -> None:
        """Widen the noise to the difference of a run whose weights were rounded otherwise.

        A deep net without residuals amplifies the last bits of its forward, which depend on the batch's
        shape.
        """
        self.knows_rounding = True
        differences = rounded - self.whole
        self._noise = torch.maximum(self._noise, _norms(self._spans, differences).nan_to_num(0.0))
        level = float(differences.norm() / self.whole.norm().clamp_min(1e-300))
        self._rounding = max(self._rounding, level if level == level else 0.0)

    def bends(self, halved: Tensor, repeated: Tensor | None = None) -> bool:
        """Whether the doubled gradient of half the loss differs: gradients are not linear in the loss then.

        Args:
            halved: the gradient of half the loss, doubled; equal to the bit if gradients are linear.
            repeated: the gradient of another run of the batch; what it differs by is allowed as noise.
        """
        noise = 0.0 if repeated is None else _NOISES * _norms(self._spans, repeated - self.whole)
        allowed = self._epsilons * (_HALVED * self._norms + _BELOW_NOTICE * self._size) + noise
        return bool((_norms(self._spans, halved - self.whole) > allowed).any())

    def differs(self, other: Tensor) -> bool:
        """Whether another run's gradient differs by more than noise explains."""
        return self.miss([other], [1.0]).excess > 1


@contextmanager
def last_bits_turned(module: nn.Module) -> Iterator[None]:
    """A context in which the last two bits of every 4- or 8-byte weight are flipped, in place; exactly undone.

    One bit alone may round away in the sum of a few products, and with it the rounding of a small error.
    """
    views: list[Tensor] = []
    for parameter in module.parameters():
        weight = getattr(parameter, "_local_tensor", parameter)  # a shard
        if (
            type(weight) in (Tensor, nn.Parameter)
            and weight.dtype in _BITS
            and weight.layout is torch.strided
        ):
            views.append(weight.data.view(_BITS[weight.dtype]))
    with torch.no_grad():
        for view in views:
            view.bitwise_xor_(3)
        try:
            yield
        finally:
            for view in views:
                view.bitwise_xor_(3)


def _norms(spans: Iterable[Span], flat: Tensor) -> Tensor:
    norms = [flat[span.start : span.stop].norm() for span in spans]
    return torch.stack(norms).double() if norms else torch.zeros(0, dtype=torch.float64)
