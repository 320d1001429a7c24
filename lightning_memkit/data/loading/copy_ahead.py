"""Copies of batches to the device on a stream of their own, one batch ahead of the one in use."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map

_IN_HOST_MEMORY = ("cpu", "mps", "meta")  # Apple's GPU computes in the host's memory


def copies_help(device: torch.device) -> bool:
    """Whether the device's memory is another than the host's."""
    return device.type not in _IN_HOST_MEMORY


def copied_ahead(device: torch.device) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """What gives batches on the device whose copies ran beside the step before; costs one more batch on the device.

    Batches in page-locked memory are copied without a wait. Tensors in nested containers are copied, and objects
    that have ``to``. Not yet verified on a GPU; the simulated device of the tests runs the same code.

    Args:
        device: An accelerator with streams.
    """
    side = torch.Stream(device)

    def ahead(batches: Iterator[Any]) -> Iterator[Any]:
        waiting: tuple[Any, Any, torch.Event] | None = None
        try:
            for host in batches:
                stream = torch.accelerator.current_stream(device)
                # Memory of batches that are let go is given to the next ones: after the steps that used it.
                side.wait_stream(stream)
                with side:
                    copied = _to(host, device)
                begun = (
                    host,
                    copied,
                    side.record_event(),
                )  # the host's side stays until the copy is waited for
                if waiting is not None:
                    stream.wait_event(waiting[2])
                    yield waiting[1]
                waiting = begun
            if waiting is not None:
                torch.accelerator.current_stream(device).wait_event(waiting[2])
                yield waiting[1]
        finally:
            side.synchronize()  # a batch that nobody wants any more: its memory goes when its copy is over

    return ahead


def _to(batch: Any, device: torch.device) -> Any:
    def moved(leaf: Any) -> Any:
        if not hasattr(leaf, "to"):
            return leaf
        try:
            return leaf.to(device, non_blocking=True)
        except TypeError:  # an object whose `to` takes a device only
            return leaf.to(device)

    return tree_map(moved, batch)
