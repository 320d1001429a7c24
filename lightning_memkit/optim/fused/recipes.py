"""Reads off a known optimizer's options which rule its step follows.

Only exact classes count, because a subclass may have another step. An optimizer without a recipe, or with
options that no kernel implements (`amsgrad`, a learning rate on an accelerator), takes its own step on
float32 shadows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_memkit.optim.fused.operands import SGD, AdamW, Lion, Rule

Group = Mapping[str, Any]
Numbers = tuple[float, ...]


def _numbers(*values: Any) -> Numbers | None:
    """Python numbers, also from tensors on the CPU; None if reading one would synchronize with a device."""
    if any(isinstance(value, Tensor) and value.device.type != "cpu" for value in values):
        return None
    return tuple(float(value) for value in values)


def _adamw_numbers(_: Optimizer, group: Group) -> Numbers | None:
    if group.get("amsgrad") or group.get("capturable"):
        return None
    return _numbers(group["lr"], *group["betas"], group["eps"], group["weight_decay"])


def _adamw(numbers: Numbers, group: Group, step: int) -> Rule:
    learning_rate, beta1, beta2, eps, weight_decay = numbers
    return AdamW(
        learning_rate=learning_rate,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        decoupled=bool(group.get("decoupled_weight_decay")),
        step=step,
        maximize=bool(group.get("maximize")),
    )


def _sgd_numbers(_: Optimizer, group: Group) -> Numbers | None:
    return _numbers(group["lr"], group["momentum"], group["dampening"], group["weight_decay"])


def _sgd(numbers: Numbers, group: Group, has_no_momentum: int) -> Rule:
    learning_rate, momentum, dampening, weight_decay = numbers
    return SGD(
        learning_rate=learning_rate,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=bool(group["nesterov"]),
        first_step=momentum != 0 and bool(has_no_momentum),
        maximize=bool(group.get("maximize")),
    )


def _lion_numbers(optimizer: Any, group: Group) -> Numbers | None:
    decay = group["weight_decay"] / optimizer._init_lr if optimizer.decoupled_wd else group["weight_decay"]
    return _numbers(group["lr"], *group["betas"], decay)


def _lion(numbers: Numbers, _: Group, __: int) -> Rule:
    learning_rate, beta1, beta2, weight_decay = numbers
    return Lion(learning_rate=learning_rate, beta1=beta1, beta2=beta2, weight_decay=weight_decay)


@dataclass(frozen=True, kw_only=True)
class StepRecipe:
    """How a kernel steps a class of optimizers.

    Args:
        numbers: the scalars of a group; None if its options ask for what no kernel implements.
        rule: makes the rule from a group's numbers, its options and the stage: the number of the step if
            `counts`, otherwise whether the parameter has no momentum yet.
        counts: whether the states count steps.
    """

    numbers: Callable[[Optimizer, Group], "Numbers | None"]
    rule: Callable[[Numbers, Group, int], Rule]
    counts: bool = False


RECIPES = {
    "torch.optim.adamw.AdamW": StepRecipe(numbers=_adamw_numbers, rule=_adamw, counts=True),
    "torch.optim.adam.Adam": StepRecipe(numbers=_adamw_numbers, rule=_adamw, counts=True),
    "torch.optim.sgd.SGD": StepRecipe(numbers=_sgd_numbers, rule=_sgd),
    "lion_pytorch.lion_pytorch.Lion": StepRecipe(numbers=_lion_numbers, rule=_lion),
}
