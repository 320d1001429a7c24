"""How a float32 weight is stored: in bfloat16 and, depending on the mode, a low half (or byte) beside it."""

from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_memkit.optim import native
from lightning_memkit.optim.blocks import flat_views
from lightning_memkit.optim.kahan import COMPENSATION, kahan_join_, kahan_split_
from lightning_memkit.optim.split import LOW_HALF, join_, split_
from lightning_memkit.optim.split24 import LOW_BYTE, join24_, split24_
from lightning_memkit.optim.stochastic_rounding import StochasticRounding

Mode = Literal["kahan", "split", "split24", "stochastic", "none"]
States = Literal["compact", "exact", "8-bit"]
_LOW: dict[str, tuple[str, torch.dtype]] = {
    "split": (LOW_HALF, torch.int16),
    "split24": (LOW_BYTE, torch.int8),
    "kahan": (COMPENSATION, torch.bfloat16),
}
_BY_DTYPE = {dtype: (mode, name) for mode, (name, dtype) in _LOW.items()}
LOW_STATES = tuple(name for name, _ in _LOW.values())


def check_options(mode: str, states: str) -> None:
    """Refuse unknown modes and states.

    Raises:
        ValueError: names the known ones.
    """
    for name, value, known in (("mode", mode, get_args(Mode)), ("states", states, get_args(States))):
        if value not in known:
            raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(map(repr, known))}.")


def low_state_of(mode: Mode) -> str | None:
    """The key of a mode's low half in the optimizer's state; None for modes without one."""
    return _LOW[mode][0] if mode in _LOW else None


def low_dtype_of(mode: Mode) -> torch.dtype | None:
    """The dtype of a mode's low half; None for modes without one."""
    return _LOW[mode][1] if mode in _LOW else None


def low_state_of_tensor(low: Tensor) -> str:
    """The key of a low half in an optimizer's state: its dtype tells its kind."""
    return _BY_DTYPE[low.dtype][1]


def widen_(high: Tensor, low: Tensor | None, out: Tensor) -> None:
    """Write the float32 weights of a bfloat16 tensor and its low half, if any, into ``out``.

    The low half's dtype decides how to join them, whatever the mode: a checkpoint may come from another mode.
    """
    flat = _for_kernel(out, high, low)
    if flat is not None:
        kind = "none" if low is None else _BY_DTYPE[low.dtype][0]
        native.widen_(kind, flat[1], flat[2] if low is not None else None, flat[0])
    elif low is None:
        out.copy_(high)
    else:
        join_low_(high, low, out)


def join_low_(high: Tensor, low: Tensor, out: Tensor) -> None:
    """`widen_` in plain torch, for a weight that has a low half."""
    {torch.int16: join_, torch.int8: join24_, torch.bfloat16: kahan_join_}[low.dtype](high, low, out)


def split_low_(master: Tensor, high: Tensor, low: Tensor) -> None:
    """`narrow_` in plain torch and to nearest, for a weight that has a low half."""
    {torch.int16: split_, torch.int8: split24_, torch.bfloat16: kahan_split_}[low.dtype](master, high, low)


def narrow_(
    mode: Mode,
    master: Tensor,
    high: Tensor,
    low: Tensor | None,
    rounding: StochasticRounding,
    stream: tuple[int, int],
) -> None:
    """Write float32 weights into bfloat16 and, for split, split24 and kahan, the remainder into the low half.

    Args:
        mode: how the remainder is stored.
        master: float32.
        high: bfloat16, of the same shape.
        low: int16 for split, int8 for split24, bfloat16 for kahan, None for the others.
        rounding: the noise of ``"stochastic"``, of split24's last bit and of Kahan's compensation.
        stream: the parameter's index, and the element that ``master`` starts at.
    """
    flat = _for_kernel(master, high, low)
    if flat is not None and mode != "stochastic":
        noise = (None, 0, 0)
        if mode in ("kahan", "split24"):
            noise = (rounding.tile_int16(), rounding.stream(stream[0], "weight"), stream[1])
        native.narrow_(mode, flat[0], flat[1], flat[2] if low is not None else None, noise)
        torch.autograd.graph.increment_version([high] if low is None else [high, low])
    elif low is not None and mode == "split":
        split_(master, high, low)
    elif low is not None and mode == "split24":
        split24_(master, high, low, rounding, stream)
    elif low is not None:
        kahan_split_(master, high, low, rounding, stream)
    elif mode == "stochastic":
        rounding.round_(master, high, (stream[0], "weight", stream[1]))
    else:
        high.copy_(master)


def _for_kernel(wide: Tensor, *others: Tensor | None) -> tuple[Tensor, ...] | None:
    """Flat views of the tensors if the CPU's kernels can take them, else None."""
    tensors = [wide, *(tensor for tensor in others if tensor is not None)]
    if wide.dtype != torch.float32 or any(tensor.device.type != "cpu" for tensor in tensors):
        return None
    return flat_views(*tensors) if native.available() else None
