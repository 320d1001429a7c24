"""Adapt bitsandbytes' optimizers to the module in a fit, and log their cost once."""

from collections.abc import Iterable
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.optim import Optimizer

from lightning_memkit.optim.bytes_per_parameter import bytes_per_parameter
from lightning_memkit.optim.eight_bit import adapt_bitsandbytes, adapter_of, is_bitsandbytes

_FEW_NAMES = 4


def adapt_bitsandbytes_in(module: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Keep sensitive parameters in 32-bit states (`optim.eight_bit`); other optimizers are left unchanged.

    After its first step, each logs its measured bytes a parameter and what has no 8-bit states.
    """
    for optimizer in optimizers:
        if is_bitsandbytes(optimizer):
            adapt_bitsandbytes(optimizer, module)
            hooks = optimizer._optimizer_step_post_hooks.values()
            if not any(isinstance(hook, _Announcement) for hook in hooks):
                optimizer.register_step_post_hook(_Announcement())


class _Announcement:
    """Logs once; a hook can't remove itself while torch iterates over the hooks."""

    def __init__(self) -> None:
        self._done = False

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        adapter = adapter_of(optimizer)
        if self._done or adapter is None:
            return
        self._done = True
        measured = bytes_per_parameter(optimizer)
        if measured.quantized is None:
            return
        kept = list(adapter.kept)
        names = ", ".join(kept[:_FEW_NAMES]) + (
            f" and {len(kept) - _FEW_NAMES} more" if kept[_FEW_NAMES:] else ""
        )
        also = f"; not quantized, since 8 bits are too few there: {names}" if kept else ""
        rank_zero_info(f"{type(optimizer).__name__}: {measured}{also}.")
