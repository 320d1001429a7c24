"""Tell states that another optimizer saved, before loading or stepping fails on a name."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

_BITSANDBYTES, _ITS_STATE = "bitsandbytes.", "state1"
_KNOWN = ("torch.optim.", _BITSANDBYTES)  # of others it is not known what they can load
# What the groups, or the states, of an optimizer have that others lack.
_WRITERS = (
    ({_ITS_STATE}, "an optimizer of bitsandbytes"),
    ({"momentum", "dampening"}, "SGD"),
    ({"momentum_decay"}, "NAdam"),
    ({"alpha", "centered"}, "RMSprop"),
    ({"lr_decay"}, "Adagrad"),
    ({"rho"}, "Adadelta"),
    ({"betas", "exp_avg", "exp_avg_sq"}, "Adam or AdamW"),
    ({"betas"}, "an optimizer like Adam"),
)


@dataclass(frozen=True)
class SavedNames:
    """What a state dict of an optimizer names; no tensors, which would stay alive with it.

    Attributes:
        options: of its first group.
        states: of its parameters.
    """

    options: frozenset[str] = frozenset()
    states: frozenset[str] = frozenset()

    @staticmethod
    def of(saved: Mapping[str, Any]) -> "SavedNames":
        """Those of what `Optimizer.state_dict` returned."""
        groups, states = saved.get("param_groups"), saved.get("state")
        if not groups or not isinstance(states, Mapping):
            return SavedNames()
        held = frozenset(name for state in states.values() for name in _names_in(state))
        return SavedNames(frozenset(groups[0]), held)


def why_foreign(optimizer: Optimizer, saved: SavedNames) -> str:
    """Why a state dict can't be this optimizer's, with what wrote it; empty if it may be.

    Options that an older version had not, or that say how a step is computed (booleans, None), may be missing.
    """
    made_by = type(optimizer).__module__
    if not saved.options or not made_by.startswith(_KNOWN):
        return ""
    missing = [
        name
        for name, value in optimizer.defaults.items()
        if name not in saved.options and value is not None and not isinstance(value, bool)
    ]
    if saved.states and made_by.startswith(_BITSANDBYTES) != (_ITS_STATE in saved.states):
        reason = f"its states are {', '.join(sorted(saved.states))}"
    elif missing:
        reason = f"it has no {', '.join(missing)}"
    else:
        return ""
    named = saved.options | saved.states
    writer = next((name for marks, name in _WRITERS if marks <= named), "another optimizer")
    return f"it was written by {writer} ({reason}), and this run's is {type(optimizer).__name__}"


def _names_in(state: Any) -> Iterator[str]:
    """The names of a parameter's states; bitsandbytes saves its own one level deeper."""
    for name, value in state.items() if isinstance(state, Mapping) else ():
        if isinstance(value, Mapping):
            yield from _names_in(value)
        else:
            yield str(name)
