"""Copies batches to the device on a separate stream, one batch ahead of the one in use."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map

_IN_HOST_MEMORY = ("cpu", "mps", "meta")  # Apple's GPU computes in the host's memory


def copies_help(device: torch.device) -> bool:
    """Whether the device has memory separate from the host's."""
    return device.type not in _IN_HOST_MEMORY


def pinning_helps(device: torch.device) -> bool:
    """Whether batches for the device belong in page-locked memory: torch has it for the present accelerator only."""
    if not copies_help(device) or not torch.accelerator.is_available():
        return False
    present = torch.accelerator.current_accelerator()
    return present is not None and present.type == device.type


def copied_ahead(device: torch.device) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """A function that yields batches copied to the device during the previous step; costs one more batch there.

    Batches in page-locked memory are copied without blocking the host. Tensors in nested containers are
    copied, and objects that have ``to``.

    Args:
        device: An accelerator with streams.
    """
    side = torch.Stream(device)

    def ahead(batches: Iterator[Any]) -> Iterator[Any]:
        waiting: tuple[Any, Any, torch.Event] | None = None
        try:
            for host in batches:
                stream = torch.accelerator.current_stream(device)
                # The memory of freed batches is reused for the next ones, but only after the steps that used
                # it.
                side.wait_stream(stream)
                with side:
                    copied = _to(host, device)
                begun = (
                    host,
                    copied,
                    side.record_event(),
                )  # keeps the host's batch until the copy is done
                if waiting is not None:
                    stream.wait_event(waiting[2])
                    yield waiting[1]
                waiting = begun
            if waiting is not None:
                torch.accelerator.current_stream(device).wait_event(waiting[2])
                yield waiting[1]
        finally:
            side.synchronize()  # the last batch may not have been used: free its memory only after its copy

    return ahead


def _to(batch: Any, device: torch.device) -> Any:
    def moved(leaf: Any) -> Any:
        if not hasattr(leaf, "to"):
            return leaf
        try:
            return leaf.to(device, non_blocking=True)
        except TypeError:  # an object whose `to` takes only a device
            return leaf.to(device)

    return tree_map(moved, batch)
