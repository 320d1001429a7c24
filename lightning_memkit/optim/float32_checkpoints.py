"""Float32 checkpoints under `PureBF16Precision`: no bit of a float32 weight is lost on the way in."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memkit.optim.compensation import Compensation
from lightning_memkit.optim.pieces import is_compensated, slots
from lightning_memkit.optim.split import LOW_HALF, split


def take_low_halves(module: nn.Module, compensations: Sequence[Compensation]) -> dict[nn.Parameter, Tensor]:
    """What the optimizers of the last fit hold beyond bfloat16, for those of the next: 2 bytes a parameter.

    Weights are rewritten as the high halves of their float32 values: a Kahan rest may round the other way.

    Args:
        module: the module that is about to be trained; parameters of others are passed over.
        compensations: of the optimizers of the last fit.
    """
    own = set(module.parameters())
    taken: dict[nn.Parameter, Tensor] = {}
    for compensation in compensations:
        for parameter, wide in compensation.float32_weights():
            if parameter in own and is_compensated(parameter):
                high, taken[parameter] = split(wide)
                parameter.detach().copy_(high)
    return taken


def capture_low_halves(
    checkpoint: Mapping[str, Any], module: nn.Module, compensations: Sequence[Compensation]
) -> None:
    """Keep what a module that was built in bfloat16 dropped of the float32 weights it has just loaded.

    A module built in float32 needs nothing: its low halves are captured when it is cast. Sharded parameters are
    passed over.

    Args:
        checkpoint: the loaded checkpoint, before the optimizers load their part of it.
        module: the LightningModule, its weights loaded.
        compensations: of its optimizers.
    """
    weights = checkpoint.get("current_model_state") or checkpoint.get("state_dict") or {}
    names = {parameter: name for name, parameter in module.named_parameters()}
    for compensation in compensations:
        if compensation.mode not in ("kahan", "split"):
            continue
        for slot in slots(compensation.optimizer):
            parameter, saved = slot.parameter, weights.get(names.get(slot.parameter))
            if not is_compensated(parameter) or not isinstance(saved, Tensor):
                continue
            if _is_source_of(saved, parameter):
                high, low = split(saved.to(parameter.device))
                parameter.detach().copy_(high)  # differs from torch's cast where float32 stood at a tie
                compensation.optimizer.state[parameter][LOW_HALF] = low


def _is_source_of(saved: Tensor, parameter: nn.Parameter) -> bool:
    """Whether a bfloat16 parameter is the rounded form of a float32 tensor."""
    if saved.dtype != torch.float32 or saved.shape != parameter.shape or hasattr(parameter, "to_local"):
        return False
    return torch.equal(saved.to(parameter.device, parameter.dtype), parameter.detach())
