"""What ranks that share out an optimizer's states (ZeRO-1) have to tell each other beside its steps."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, distributed
from torch.optim import Optimizer

from lightning_memkit.optim.consolidate import float32_weight
from lightning_memkit.optim.modes import LOW_STATES


def is_shared_out(optimizer: Any) -> bool:
    """Whether it is a `ZeroRedundancyOptimizer`, whose states of a parameter one rank has."""
    return hasattr(optimizer, "_param_to_rank") and hasattr(optimizer, "optim")


def own_shares(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """The optimizers that step here: of those that are shared out the one within."""
    return [getattr(one, "optim", one) if is_shared_out(one) else one for one in optimizers]


def float32_weights_of_owners(optimizers: Iterable[Any]) -> Callable[[Tensor, Mapping[str, Any]], Tensor]:
    """`float32_weight` that gives every rank what the rank with the low half knows: 4 bytes a value over the links.

    It is a collective for each weight whose states are shared out: all ranks call it for the same weights in order.
    """
    owners = {
        parameter: (one.process_group, rank)
        for one in optimizers
        if is_shared_out(one)
        for parameter, rank in one._param_to_rank.items()
    }

    def of_owner(weight: Tensor, state: Mapping[str, Any]) -> Tensor:
        wide = float32_weight(weight, state)
        if weight in owners:
            group, rank = owners[weight]
            distributed.broadcast(wide, distributed.get_global_rank(group, rank), group=group)
        return wide

    return of_owner


@torch.no_grad()
def tell_weights(optimizers: Iterable[Any]) -> None:
    """Give every rank the weights of the rank that has their states: a low half belongs to one way to round."""
    for optimizer in optimizers:
        if is_shared_out(optimizer):
            optimizer._sync_params()


def keep_low_halves(optimizer: Any) -> None:
    """Have a `ZeroRedundancyOptimizer` keep low halves that a state dict it loads knows nothing of.

    Those of a float32 checkpoint's weights are captured when the weights are cast, before its states are loaded.
    """
    plain = optimizer.load_state_dict

    def load_state_dict(state_dict: dict[str, Any]) -> None:
        own = optimizer.optim.state
        low = {key: {name: state[name] for name in LOW_STATES if name in state} for key, state in own.items()}
        plain(state_dict)
        for parameter, kept in low.items():
            if not any(name in own[parameter] for name in LOW_STATES):
                own[parameter].update(kept)

    optimizer.load_state_dict = load_state_dict
