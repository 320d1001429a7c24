"""Warn of what a trial has changed and could not put back."""

import warnings
from collections.abc import Iterable

from lightning_memkit.micro_batching.changes.step_changes import label

_LOST = (
    "A trial step changed {names} by a kernel that PyTorch's dispatcher does not see: these keep what the trial left. "
    "Register the kernel as an operator that names what it writes to (torch.library.custom_op with mutates_args)."
)


def warn_of_lost(keys: Iterable[tuple[str, str]]) -> None:
    """Warn of these tensors, if any, named by the paths of their modules and their own names."""
    names = ", ".join(sorted(label(*key) for key in keys))
    if names:
        warnings.warn(_LOST.format(names=names), stacklevel=3)
