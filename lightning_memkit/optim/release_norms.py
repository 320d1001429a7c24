"""The norm of gradients that were measured one by one, as `clip_grad_norm_` computes it of all at once."""

from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from lightning_memkit.optim.pieces import slots


def total_of(norms: dict[Parameter, Tensor], optimizer: Optimizer) -> Tensor:
    """The norm of all gradients from that of each, in the optimizer's order; of all ranks' shards."""
    # A scalar's norm is its magnitude: torch combines the norms in the groups that it makes of gradients.
    total = get_total_norm([norms[slot.parameter] for slot in slots(optimizer) if slot.parameter in norms])
    whole: Any = getattr(total, "full_tensor", None)  # a DTensor is reduced over ranks
    return total if whole is None else whole()


def refuse_unmeasured(parameters: list[Parameter]) -> None:
    """Refuse to clip by a measured norm that lacks these parameters' gradients.

    Raises:
        RuntimeError: there are any.
    """
    if parameters:
        raise RuntimeError(
            f"{len(parameters)} parameters got their gradients outside of the backward that was measured, so the norm "
            "to clip by does not count them; clip by value, or don't release gradients."
        )
