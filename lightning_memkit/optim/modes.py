"""Where a float32 weight is kept: bfloat16 and, by the mode, a low half beside it."""

from typing import Literal

from torch import Tensor

from lightning_memkit.optim.kahan import COMPENSATION, kahan_join_, kahan_split_
from lightning_memkit.optim.split import LOW_HALF, join_, split_
from lightning_memkit.optim.stochastic_rounding import StochasticRounding

Mode = Literal["kahan", "split", "stochastic", "none"]
States = Literal["compact", "exact"]
LOW_STATES = (LOW_HALF, COMPENSATION)


def low_state_of(mode: Mode) -> str | None:
    """The name under which a mode keeps its low half in the optimizer's state; None where it keeps none."""
    return {"split": LOW_HALF, "kahan": COMPENSATION}.get(mode)


def widen_(high: Tensor, low: Tensor | None, out: Tensor) -> None:
    """Write the float32 weights of a bfloat16 tensor and its low half, if there is one, into ``out``.

    The low half's dtype says which kind it is, whatever the mode: a checkpoint may come from another mode.
    """
    if low is None:
        out.copy_(high)
    elif low.dtype == high.dtype:
        kahan_join_(high, low, out)
    else:
        join_(high, low, out)


def narrow_(
    mode: Mode,
    master: Tensor,
    high: Tensor,
    low: Tensor | None,
    rounding: StochasticRounding,
    stream: tuple[int, int],
) -> None:
    """Write float32 weights into bfloat16 and, for split and kahan, what is left over into the low half.

    Args:
        mode: what keeps the rest.
        master: float32.
        high: bfloat16, of the same shape.
        low: int16 for split, bfloat16 for kahan, None for the others.
        rounding: the noise of ``"stochastic"``.
        stream: the parameter's index, and the element that ``master`` starts at.
    """
    if low is not None:
        (split_ if mode == "split" else kahan_split_)(master, high, low)
    elif mode == "stochastic":
        rounding.round_(master, high, (stream[0], "weight", stream[1]))
    else:
        high.copy_(master)
