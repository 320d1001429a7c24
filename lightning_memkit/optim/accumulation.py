"""Sees a backward pass that adds to gradients of an earlier one, which no setting tells of.

Manual optimization, and a `optimizer_zero_grad` of the user's own, keep gradients over as many backward passes as
they like. The first pass that adds to a gradient is the last moment at which the sum can still be widened
without losing a bit.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from lightning_memkit.utilities.patching import Undo

_watches: list[list[bool]] = []  # of each watch, whether it looks: empty for not now


@contextmanager
def ignoring_accumulation() -> Iterator[None]:
    """A context in which no watch looks that was begun before: the run's own, while its step is simulated."""
    before = [(watch, list(watch)) for watch in _watches]
    for watch, _ in before:
        watch.clear()
    try:
        yield
    finally:
        for watch, looked in before:
            watch[:] = looked if any(watch is one for one in _watches) else []


def watch_accumulation(watched: Callable[[], Iterable[Tensor]], seen: Callable[[], None]) -> Undo:
    """Call ``seen`` within a backward pass, right before it adds to a gradient that is not zero.

    It replaces `torch.autograd.backward`, so that it sees each backward, whoever calls it. Where gradients are
    None, a backward costs one look at each tensor; where they are zeros, one synchronization.

    Args:
        watched: gives the leaves to look at; none if there is nothing to watch for.
        seen: may change the dtype of the leaves' gradients. Leaves that are sharded (DTensor) get theirs after
            the backward: for them it is called before.

    Returns:
        The undo.
    """
    plain, active = torch.autograd.backward, [True]
    _watches.append(active)

    @wraps(plain)
    def backward(*args: Any, **kwargs: Any) -> None:
        within = torch._C._current_graph_task_id() != -1  # a checkpoint's recomputation: part of another pass
        leaves = watched() if active and not within else ()
        kept = [leaf for leaf in leaves if leaf.grad is not None and leaf.requires_grad]
        if not kept or not _any_nonzero(kept):
            plain(*args, **kwargs)
            return
        if any(hasattr(leaf, "placements") for leaf in kept):
            seen()
        handles = [leaf.register_hook(partial(_before_sum, leaf, seen)) for leaf in kept]
        try:
            plain(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()

    def undo() -> None:
        active.clear()
        _watches[:] = [watch for watch in _watches if watch is not active]
        if torch.autograd.backward is backward:
            torch.autograd.backward = plain

    torch.autograd.backward = backward
    return undo


def _before_sum(leaf: Tensor, seen: Callable[[], None], _gradient: Tensor) -> None:
    if leaf.grad is not None:  # it may have been set to None by another hook
        seen()


def _any_nonzero(leaves: Sequence[Tensor]) -> bool:
    """Whether a gradient is kept that `zero_grad(set_to_none=False)` has not cleared."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for leaf in leaves:
        gradient: Any = leaf.grad
        gradient = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        if gradient.layout != torch.strided:
            return True
        if gradient.numel():
            by_device.setdefault(gradient.device, []).append(gradient.detach())
    largest = (torch._foreach_norm(gradients, float("inf")) for gradients in by_device.values())
    return any(bool(torch.stack([norm.float() for norm in norms]).any()) for norms in largest)
