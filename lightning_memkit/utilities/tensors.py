"""Find the tensors in nested values; send one to a device."""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type


def tensors_of(item: Any) -> Iterator[Tensor]:
    """Every tensor in nested dicts, lists, tuples and dataclasses."""
    if isinstance(item, Tensor):
        yield item
    elif isinstance(item, Mapping):
        for value in item.values():
            yield from tensors_of(value)
    elif isinstance(item, (list, tuple)):
        for value in item:
            yield from tensors_of(value)
    elif hasattr(item, "__dataclass_fields__"):
        yield from tensors_of(list(vars(item).values()))


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to the device from pinned memory, in its stream's order: the host does not wait. On a CPU, as it is."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def is_wrapper(value: object) -> bool:
    """Whether a value is a tensor made of others, as a DTensor is: torch's own answer, looked up once a class."""
    return _is_wrapper_class(type(value))


@lru_cache(maxsize=256)
def _is_wrapper_class(kind: type) -> bool:
    return is_traceable_wrapper_subclass_type(kind)


def storage_is_freed(tensor: Tensor) -> bool:
    """Whether a live tensor's memory was freed, as FSDP does; reading it would crash the process."""
    if tensor.layout is not torch.strided or is_wrapper(tensor):
        return False
    return bool(not tensor.untyped_storage().nbytes() and tensor.numel() and tensor.device.type != "meta")
