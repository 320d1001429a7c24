"""What a fused step takes: the tensors of a parameter, and the numbers of an optimizer's rule."""

from dataclasses import dataclass

from torch import Tensor

from lightning_memkit.optim.state_dtypes import NEAREST_UP_TO_DECAY


@dataclass(kw_only=True, slots=True)  # not frozen, which would cost more than all else that is done for it
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
