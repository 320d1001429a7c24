"""Loads float32 checkpoints under `PureBF16Precision` without losing a bit of a float32 weight."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memkit.optim.compensation import Compensation
from lightning_memkit.optim.low_halves import give_low_halves
from lightning_memkit.optim.modes import LOW_STATES, low_state_of
from lightning_memkit.optim.pieces import is_compensated, slots
from lightning_memkit.optim.split import split


def take_low_halves(module: nn.Module, compensations: Sequence[Compensation]) -> dict[nn.Parameter, Tensor]:
    """Carry the low halves of the last fit's optimizers over to the next fit: 2 bytes a parameter.

    Weights are rewritten as the high halves of their float32 values, because Kahan's compensation may round
    to the other neighbour.

    Args:
        module: the module that is about to be trained; parameters of others are skipped.
        compensations: those of the last fit's optimizers.
    """
    own = set(module.parameters())
    taken: dict[nn.Parameter, Tensor] = {}
    for compensation in compensations:
        state = compensation.optimizer.state
        for parameter, wide in compensation.float32_weights():
            if parameter not in own or not is_compensated(parameter) or parameter in taken:
                continue
            # Those that no state has are still where they were captured.
            if set(LOW_STATES) & state.get(parameter, {}).keys():
                high, taken[parameter] = split(wide)
                parameter.detach().copy_(high)
    return taken


def capture_low_halves(
    checkpoint: Mapping[str, Any], module: nn.Module, compensations: Sequence[Compensation]
) -> None:
    """Capture the low halves that a module built in bfloat16 dropped from the float32 weights it has just loaded.

    A module built in float32 needs nothing: its low halves are captured when it is cast. Sharded parameters
    are skipped.

    Args:
        checkpoint: the loaded checkpoint, before the optimizers load their states.
        module: the LightningModule, its weights loaded.
        compensations: those of its optimizers.
    """
    weights = checkpoint.get("current_model_state") or checkpoint.get("state_dict") or {}
    names = {parameter: name for name, parameter in module.named_parameters()}
    takers = [one for one in compensations if low_state_of(one.mode) is not None]
    captured: dict[nn.Parameter, Tensor] = {}
    for slot in chain.from_iterable(slots(one.optimizer) for one in takers):
        parameter, saved = slot.parameter, weights.get(names.get(slot.parameter))
        if parameter in captured or not is_compensated(parameter) or not isinstance(saved, Tensor):
            continue
        if _is_source_of(saved, parameter):
            high, captured[parameter] = split(saved.to(parameter.device))
            parameter.detach().copy_(high)  # differs from torch's cast if the float32 value was a tie
    for compensation in takers:
        give_low_halves(compensation, captured)


def _is_source_of(saved: Tensor, parameter: nn.Parameter) -> bool:
    """Whether a bfloat16 parameter is the rounded value of a float32 tensor."""
    if saved.dtype != torch.float32 or saved.shape != parameter.shape or hasattr(parameter, "to_local"):
        return False
    return torch.equal(saved.to(parameter.device, parameter.dtype), parameter.detach())
