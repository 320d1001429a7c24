"""Makes the state dicts of optimizers that wrap others (Lookahead) exact, however they are laid out.

A wrapper that overrides `state_dict` or `load_state_dict` calls those of the optimizers inside and writes its
own values beside them. So the hooks of `checkpoints` go onto each optimizer inside, and the wrapper's low
halves, which its own code may leave out, are saved in an entry of their own.
"""

from collections.abc import Mapping
from functools import wraps
from typing import Any
from weakref import ref

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_memkit.optim.checkpoints import (
    LOW_HALVES_KEY,
    STATE_KEY,
    as_low,
    gatherable,
    install_checkpoint_hooks,
    written_to,
)
from lightning_memkit.optim.methods import WeakMethod, is_known_class
from lightning_memkit.optim.modes import LOW_STATES
from lightning_memkit.optim.own_attributes import inner_optimizers
from lightning_memkit.optim.pieces import slots
from lightning_memkit.optim.stochastic_rounding import StochasticRounding
from lightning_memkit.utilities.patching import Undo


def keep_states_exact(optimizer: Optimizer, rounding: StochasticRounding) -> Undo:
    """Make an optimizer's `state_dict` and `load_state_dict` exact, and those of the optimizers it wraps.

    Returns:
        The undo.
    """
    undo = [install_checkpoint_hooks(optimizer, rounding)]
    hooked = {id(optimizer._optimizer_load_state_dict_pre_hooks)}
    for inner in inner_optimizers(optimizer):
        # A wrapper may share all attributes of the one inside, its hooks, too.
        if id(inner._optimizer_load_state_dict_pre_hooks) not in hooked:
            hooked.add(id(inner._optimizer_load_state_dict_pre_hooks))
            undo.append(install_checkpoint_hooks(inner, None))
    if _lays_out_its_own(optimizer):
        undo.append(_keep_low_halves(optimizer, rounding))

    def undo_all() -> None:
        for each in reversed(undo):
            each()

    return undo_all


def _lays_out_its_own(optimizer: Optimizer) -> bool:
    return not is_known_class(optimizer) and type(optimizer).state_dict is not Optimizer.state_dict


def _keep_low_halves(optimizer: Optimizer, rounding: StochasticRounding) -> Undo:
    """Save the low halves beside whatever the optimizer's own `state_dict` returns, and load them."""
    previous = {name: optimizer.__dict__.get(name) for name in ("state_dict", "load_state_dict")}
    kind = type(optimizer)
    save = previous["state_dict"] or WeakMethod(kind.state_dict, optimizer)
    load = previous["load_state_dict"] or WeakMethod(kind.load_state_dict, optimizer)

    @wraps(kind.state_dict)
    def state_dict(optimizer: Optimizer, *args: Any, **kwargs: Any) -> dict[str, Any]:
        saved = save(*args, **kwargs)
        if not isinstance(saved, Mapping):
            raise TypeError(
                f"{kind.__name__}.state_dict returns a {type(saved).__name__}: the low halves of compensated bfloat16 "
                "weights are saved as one more entry of it, so it must be a dict; return one, or train in float32 "
                "(precision='32-true')."
            )
        low = {slot.index: gatherable(_low_of(optimizer, slot.parameter)) for slot in slots(optimizer)}
        low = {index: state for index, state in low.items() if state}
        return {**saved, STATE_KEY: {"rounding": rounding.state_dict(), LOW_HALVES_KEY: low}}

    @wraps(kind.load_state_dict)
    def load_state_dict(
        optimizer: Optimizer, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        ours = state_dict.get(STATE_KEY, {})
        before = {slot.parameter: _low_of(optimizer, slot.parameter) for slot in slots(optimizer)}
        load({key: value for key, value in state_dict.items() if key != STATE_KEY}, *args, **kwargs)
        if "rounding" in ours:
            rounding.load_state_dict(ours["rounding"])
        for slot in slots(optimizer):
            parameter = slot.parameter
            saved = ours.get(LOW_HALVES_KEY, {}).get(slot.index) or _low_of(optimizer, parameter)
            low = before.get(parameter, {})  # stay after loading a checkpoint of float32 training
            if saved:
                low = written_to(low, {name: as_low(name, value) for name, value in saved.items()}, parameter)
            if low:
                state = optimizer.state.setdefault(parameter, {})
                for name in LOW_STATES:
                    state.pop(name, None)
                state.update(low)

    replaced = {"state_dict": state_dict, "load_state_dict": load_state_dict}
    methods = {name: WeakMethod(function, optimizer) for name, function in replaced.items()}
    vars(optimizer).update(methods)
    owner = ref(optimizer)

    def undo() -> None:
        attributes = getattr(owner(), "__dict__", {})
        for name, method in methods.items():
            if attributes.get(name) is method:
                if previous[name] is None:
                    del attributes[name]
                else:
                    attributes[name] = previous[name]

    return undo


def _low_of(optimizer: Optimizer, parameter: Parameter) -> dict[str, Tensor]:
    state = optimizer.state.get(parameter, {})
    return {name: state[name] for name in LOW_STATES if name in state} if isinstance(state, dict) else {}
