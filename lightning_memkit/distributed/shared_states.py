"""What ranks that shard an optimizer's states (ZeRO-1) must exchange in addition to its steps."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, distributed
from torch.optim import Optimizer

from lightning_memkit.optim.consolidate import float32_weight
from lightning_memkit.optim.modes import LOW_STATES


def is_shared_out(optimizer: Any) -> bool:
    """Whether it is a `ZeroRedundancyOptimizer`, in which one rank holds the states of a parameter."""
    return hasattr(optimizer, "_param_to_rank") and hasattr(optimizer, "optim")


def own_shares(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """The optimizers that step on this rank: for sharded ones the local optimizer inside."""
    return [getattr(one, "optim", one) if is_shared_out(one) else one for one in optimizers]


def float32_weights_of_owners(optimizers: Iterable[Any]) -> Callable[[Tensor, Mapping[str, Any]], Tensor]:
    """A `float32_weight` that broadcasts the weight from the rank with the low half; 4 bytes a value.

    It is a collective for each weight with sharded states: all ranks must call it for the same weights in
    order.
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
    """Broadcast each weight from the rank with its states, whose low half belongs to that rounding of it."""
    for optimizer in optimizers:
        if is_shared_out(optimizer):
            optimizer._sync_params()


def keep_low_halves(optimizer: Any) -> None:
    """Make a `ZeroRedundancyOptimizer` keep its low halves if a state dict that it loads has none.

    Low halves of a float32 checkpoint's weights are captured when weights are cast, before states are loaded.
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
