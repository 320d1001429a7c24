"""Replace torch's optimizers by bitsandbytes' with 8-bit states, in code and in a config."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from torch.optim import SGD, Adam, AdamW, Optimizer

# Looked up by exact class, since a subclass may step differently.
_OPTIONS: dict[type[Optimizer], tuple[str, ...]] = {
    Adam: ("lr", "betas", "eps", "weight_decay"),
    AdamW: ("lr", "betas", "eps", "weight_decay"),
    SGD: ("lr", "momentum", "dampening", "weight_decay"),
}
_NOT_THERE = ("amsgrad", "maximize", "nesterov", "dampening", "differentiable")  # bitsandbytes lacks these
_OF_BITSANDBYTES = ("lr", "betas", "eps", "weight_decay", "initial_lr")  # options in bitsandbytes' groups


@dataclass(frozen=True, kw_only=True)
class EightBit:
    """An optimizer of bitsandbytes that replaces one of torch's; 8-bit moments, which change numbers.

    Attributes:
        replaces: the name of torch's class.
        options: its options.
    """

    replaces: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of bitsandbytes' class."""
        return f"{self.replaces}8bit"

    @property
    def line(self) -> str:
        """The code to write in `configure_optimizers`."""
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"bitsandbytes.optim.{self.name}(self.parameters(), {options})"

    def as_yaml(self, section: Mapping[str, Any]) -> dict[str, Any]:
        """The `optimizer` section of a config, replacing torch's."""
        given = section.get("init_args") or {}
        kept = {name: given[name] for name in self.options if given.get(name) is not None}
        return {"class_path": f"bitsandbytes.optim.{self.name}", "init_args": kept}


def eight_bit_of(optimizer: Optimizer) -> EightBit:
    """The optimizer that takes the same steps with 8-bit states.

    Raises:
        ValueError: bitsandbytes has no such optimizer.
    """
    kind = type(optimizer)
    if kind not in _OPTIONS:
        known = ", ".join(known.__name__ for known in _OPTIONS)
        raise ValueError(
            f"{kind.__name__} has no 8-bit equivalent that is known here; of torch's have {known}"
        )
    for group in optimizer.param_groups:
        for name in _NOT_THERE:
            if group.get(name):
                raise ValueError(f"{kind.__name__}({name}={group[name]!r}) has no 8-bit equivalent")
        if kind is SGD and not group["momentum"]:
            raise ValueError("SGD without momentum keeps no states")
        if kind is Adam and group["weight_decay"] and not group.get("decoupled_weight_decay"):
            raise ValueError(
                f"Adam(weight_decay={group['weight_decay']}) adds the decay to the gradient, which bitsandbytes' Adam "
                "takes from the weight; AdamW has an 8-bit equivalent"
            )
    options = {name: optimizer.defaults[name] for name in _OPTIONS[kind]}
    return EightBit(replaces=kind.__name__, options=options)


def with_8_bit_states(optimizer: Optimizer) -> Optimizer:
    """An optimizer of bitsandbytes with the same parameters, groups and options; use before the first step.

    Raises:
        ValueError: bitsandbytes has no such optimizer.
        ModuleNotFoundError: it is not installed.
    """
    found = eight_bit_of(optimizer)
    kind = getattr(import_module("bitsandbytes.optim"), found.name)
    groups = []
    for group in optimizer.param_groups:
        own = {name: group[name] for name in _OF_BITSANDBYTES if name in group}
        if "momentum" in group:
            own["betas"] = (group["momentum"], group["dampening"])
        groups.append({"params": group["params"], **own})
    return kind(groups, **found.options)
