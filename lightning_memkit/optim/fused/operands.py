"""The inputs of a fused step: a parameter's tensors, and the numbers of an optimizer's rule."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_memkit.optim import native
from lightning_memkit.optim.state_dtypes import NEAREST_UP_TO_DECAY

# The tensors of an operand, in the order of the columns that kernels read.
TENSORS = ("weight", "low", "gradient", "first", "second", "first_scales", "second_scales")


@dataclass(frozen=True, kw_only=True, slots=True)
class Operand:
    """One parameter's tensors, on one device without gaps, and all but the scales of one length and order in memory.

    Args:
        index: the parameter's place in its optimizer, which selects its rounding noise.
        weight: bfloat16, written.
        low: int16 low half (split), int8 low byte (split24), bfloat16 compensation (kahan), written; None for the
            other modes.
        gradient: bfloat16 or float32, read.
        first: bfloat16 momentum, or its int8 codes, written; None where the rule keeps none.
        second: bfloat16 second moment, or its uint8 codes, written; None where the rule keeps none.
        first_scales: bfloat16 [rows, blocks], written; None unless ``first`` holds codes.
        second_scales: bfloat16 [rows, blocks], written; None unless ``second`` holds codes.
        length: of a row, where moments are codes; else 0.
        start: the offset of these elements in the whole parameter, of which they may be a shard; selects the
            noise.
    """

    index: int
    weight: Tensor
    low: Tensor | None
    gradient: Tensor
    first: Tensor | None = None
    second: Tensor | None = None
    first_scales: Tensor | None = None
    second_scales: Tensor | None = None
    length: int = 0
    start: int = 0


@dataclass(kw_only=True, slots=True, eq=False)
class Operands:
    """The tensors of many parameters in columns, as the kernels take them.

    Args:
        indices: each `Operand.index`, uint64.
        weights: each `Operand.weight`.
        lows: each `Operand.low`.
        gradients: each `Operand.gradient`.
        firsts: each `Operand.first`.
        seconds: each `Operand.second`.
        first_scales: each `Operand.first_scales`.
        second_scales: each `Operand.second_scales`.
        lengths: each `Operand.length`, uint64.
        starts: each `Operand.start`, uint64.
        counts: the number of elements of each, uint64.
        addresses: of weight, low, gradient, first, second, and the scales of these two, uint64 [operands, 7]; 0 for
            None.
        wide: whether each gradient is float32.
        is_uniform: all are on one device, not empty, and have the same tensors and dtypes: one launch is
            enough.
    """

    indices: np.ndarray
    weights: list[Tensor]
    lows: list[Tensor | None]
    gradients: list[Tensor]
    firsts: list[Tensor | None]
    seconds: list[Tensor | None]
    first_scales: list[Tensor | None]
    second_scales: list[Tensor | None]
    lengths: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    addresses: np.ndarray
    wide: np.ndarray
    is_uniform: bool = False

    @classmethod
    def of(cls, given: "Sequence[Operand] | Operands") -> "Operands":
        """Arrange single operands in columns."""
        if isinstance(given, Operands):
            return given
        fields = [tuple(getattr(one, name) for name in TENSORS) for one in given]
        columns = (list(column) for column in zip(*fields, strict=True))
        weights, lows, gradients, firsts, seconds, first_scales, second_scales = columns
        addresses = [native.address(tensor) for tensors in fields for tensor in tensors]
        return cls(
            indices=np.array([one.index for one in given], np.uint64),
            weights=weights,
            lows=lows,
            gradients=gradients,
            firsts=firsts,
            seconds=seconds,
            first_scales=first_scales,
            second_scales=second_scales,
            lengths=np.array([one.length for one in given], np.uint64),
            starts=np.array([one.start for one in given], np.uint64),
            counts=np.array([one.weight.numel() for one in given], np.uint64),
            addresses=np.array(addresses, np.uint64).reshape(-1, len(TENSORS)),
            wide=np.array([one.gradient.dtype == torch.float32 for one in given]),
        )

    def __len__(self) -> int:
        return len(self.weights)

    def __iter__(self) -> Iterator[Operand]:
        columns = (self.weights, self.lows, self.gradients, self.firsts, self.seconds)
        columns += (self.first_scales, self.second_scales)
        for place, tensors in enumerate(zip(*columns, strict=True)):
            yield Operand(
                index=int(self.indices[place]),
                **dict(zip(TENSORS, tensors, strict=True)),
                length=int(self.lengths[place]),
                start=int(self.starts[place]),
            )

    def only(self, places: Sequence[int]) -> "Operands":
        """The operands at the given places, in that order."""
        chosen = list(places)
        return Operands(
            indices=self.indices[chosen],
            weights=[self.weights[place] for place in chosen],
            lows=[self.lows[place] for place in chosen],
            gradients=[self.gradients[place] for place in chosen],
            firsts=[self.firsts[place] for place in chosen],
            seconds=[self.seconds[place] for place in chosen],
            first_scales=[self.first_scales[place] for place in chosen],
            second_scales=[self.second_scales[place] for place in chosen],
            lengths=self.lengths[chosen],
            starts=self.starts[chosen],
            counts=self.counts[chosen],
            addresses=self.addresses[chosen],
            wide=self.wide[chosen],
            is_uniform=self.is_uniform,
        )

    def written(self) -> list[Tensor]:
        """The tensors that a step writes."""
        columns = (self.weights, self.lows, self.firsts, self.seconds, self.first_scales, self.second_scales)
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
        """The factor by which decoupled weight decay scales a weight."""
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
        dampening: the fraction of the gradient that the momentum leaves out.
        weight_decay: factor of the weight, added to the gradient.
        nesterov: use Nesterov momentum.
        first_step: initialize the momentum with the gradient.
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
        """The factor by which weight decay scales a weight."""
        return 1 - self.learning_rate * self.weight_decay


Rule = AdamW | SGD | Lion


def first_is_stochastic(rule: Rule) -> bool:
    """Whether the first moment decays so slowly that it must be rounded stochastically."""
    if isinstance(rule, AdamW):
        decay = rule.beta1
    else:
        decay = rule.momentum if isinstance(rule, SGD) else max(rule.beta1, rule.beta2)
    return decay > NEAREST_UP_TO_DECAY
