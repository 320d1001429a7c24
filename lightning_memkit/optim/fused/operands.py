"""What a fused step takes: the tensors of a parameter, and the numbers of an optimizer's rule."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_memkit.optim import native
from lightning_memkit.optim.state_dtypes import NEAREST_UP_TO_DECAY


@dataclass(frozen=True, kw_only=True, slots=True)
class Operand:
    """One parameter's tensors, all of one length and order in memory, without gaps, on one device.

    Args:
        index: the parameter's place among all of its optimizer's: which rounding noise is its own.
        weight: bfloat16, written.
        low: int16 low half (split), bfloat16 compensation (kahan), written; None for the other modes.
        gradient: bfloat16 or float32, read.
        first: bfloat16 momentum, written; None where the rule keeps none.
        second: bfloat16 second moment, written; None where the rule keeps none.
        start: where these elements begin in the whole parameter, of which they may be a shard: noise goes by it.
    """

    index: int
    weight: Tensor
    low: Tensor | None
    gradient: Tensor
    first: Tensor | None = None
    second: Tensor | None = None
    start: int = 0


@dataclass(kw_only=True, slots=True, eq=False)
class Operands:
    """Many parameters' tensors by columns, as the kernels take them.

    Args:
        indices: `Operand.index` of each, uint64.
        weights: `Operand.weight` of each; and so on.
        lows: of each, or None.
        gradients: of each.
        firsts: of each, or None.
        seconds: of each, or None.
        starts: `Operand.start` of each, uint64.
        counts: elements of each, uint64.
        addresses: where weight, low, gradient, first and second of each begin, uint64 [operands, 5]; 0 for None.
        wide: whether each gradient is float32.
        is_uniform: all are on one device, not empty, and have the same tensors and dtypes: one launch takes them.
    """

    indices: np.ndarray
    weights: list[Tensor]
    lows: list[Tensor | None]
    gradients: list[Tensor]
    firsts: list[Tensor | None]
    seconds: list[Tensor | None]
    starts: np.ndarray
    counts: np.ndarray
    addresses: np.ndarray
    wide: np.ndarray
    is_uniform: bool = False

    @classmethod
    def of(cls, given: "Sequence[Operand] | Operands") -> "Operands":
        """The columns of single operands."""
        if isinstance(given, Operands):
            return given
        fields = [(one.weight, one.low, one.gradient, one.first, one.second) for one in given]
        weights, lows, gradients, firsts, seconds = (list(column) for column in zip(*fields, strict=True))
        addresses = [native.address(tensor) for five in fields for tensor in five]
        return cls(
            indices=np.array([one.index for one in given], np.uint64),
            weights=weights,
            lows=lows,
            gradients=gradients,
            firsts=firsts,
            seconds=seconds,
            starts=np.array([one.start for one in given], np.uint64),
            counts=np.array([one.weight.numel() for one in given], np.uint64),
            addresses=np.array(addresses, np.uint64).reshape(-1, 5),
            wide=np.array([one.gradient.dtype == torch.float32 for one in given]),
        )

    def __len__(self) -> int:
        return len(self.weights)

    def __iter__(self) -> Iterator[Operand]:
        columns = (self.weights, self.lows, self.gradients, self.firsts, self.seconds)
        for place, (weight, low, gradient, first, second) in enumerate(zip(*columns, strict=True)):
            yield Operand(
                index=int(self.indices[place]),
                weight=weight,
                low=low,
                gradient=gradient,
                first=first,
                second=second,
                start=int(self.starts[place]),
            )

    def only(self, places: Sequence[int]) -> "Operands":
        """Those at some places, in that order."""
        chosen = list(places)
        return Operands(
            indices=self.indices[chosen],
            weights=[self.weights[place] for place in chosen],
            lows=[self.lows[place] for place in chosen],
            gradients=[self.gradients[place] for place in chosen],
            firsts=[self.firsts[place] for place in chosen],
            seconds=[self.seconds[place] for place in chosen],
            starts=self.starts[chosen],
            counts=self.counts[chosen],
            addresses=self.addresses[chosen],
            wide=self.wide[chosen],
            is_uniform=self.is_uniform,
        )

    def written(self) -> list[Tensor]:
        """The tensors that a step writes."""
        columns = (self.weights, self.lows, self.firsts, self.seconds)
        return [tensor for column in columns for tensor in column if tensor is not None]


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101), or Adam with its decay in the gradient, as in torch.optim.

    Args:
        learning_rate: of this step.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the root of the second moment.
        weight_decay: factor of the weight.
        decoupled: False adds the decay to the gradient (Adam).
        step: the number of this step, from 1.
        maximize: climb instead of descend.
    """

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    step: int
    maximize: bool = False

    first_name = "exp_avg"
    second_name = "exp_avg_sq"

    @property
    def shrink(self) -> float:
        """What decoupled decay leaves of a weight."""
        return 1 - self.learning_rate * self.weight_decay if self.decoupled else 1.0

    @property
    def step_size(self) -> float:
        """Learning rate over the first moment's bias correction."""
        return self.learning_rate / (1 - self.beta1**self.step)

    @property
    def root_correction(self) -> float:
        """Root of the second moment's bias correction."""
        return (1 - self.beta2**self.step) ** 0.5


@dataclass(frozen=True, kw_only=True)
class SGD:
    """Stochastic gradient descent with momentum, as in torch.optim.

    Args:
        learning_rate: of this step.
        momentum: decay of the momentum.
        dampening: what the momentum leaves out of the gradient.
        weight_decay: factor of the weight, added to the gradient.
        nesterov: look ahead by one momentum.
        first_step: the momentum starts as the gradient.
        maximize: climb instead of descend.
    """

    learning_rate: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    first_step: bool
    maximize: bool = False

    first_name = "momentum_buffer"
    second_name = ""


@dataclass(frozen=True, kw_only=True)
class Lion:
    """Lion (Chen et al., arXiv:2302.06675): the sign of an interpolated momentum.

    Args:
        learning_rate: of this step.
        beta1: weight of the momentum in the update.
        beta2: decay of the momentum.
        weight_decay: decoupled.
    """

    learning_rate: float
    beta1: float
    beta2: float
    weight_decay: float

    first_name = "exp_avg"
    second_name = ""

    @property
    def shrink(self) -> float:
        """What the decay leaves of a weight."""
        return 1 - self.learning_rate * self.weight_decay


Rule = AdamW | SGD | Lion


def first_is_stochastic(rule: Rule) -> bool:
    """Whether the first moment decays so slowly that it must be rounded stochastically."""
    if isinstance(rule, AdamW):
        decay = rule.beta1
    else:
        decay = rule.momentum if isinstance(rule, SGD) else max(rule.beta1, rule.beta2)
    return decay > NEAREST_UP_TO_DECAY
