"""Notice collectives that nobody here knows of: they make it impossible to repeat one rank's step."""

from typing import Any

from torch import distributed
from torch.distributed import distributed_c10d

from lightning_memkit.distributed.own_group import own_groups


def collectives_issued(*ignored: Any) -> int | None:
    """How many collectives this rank has issued, on all groups but those ignored; None where it isn't counted.

    The difference of two calls is what ran between them. It costs some microseconds a group. Those of a thread that
    writes checkpoints don't count: they are no part of a step.
    """
    if not distributed.is_initialized():
        return 0
    groups: Any = getattr(getattr(distributed_c10d, "_world", None), "pg_map", None)
    if groups is None:
        return None
    ignored = (*ignored, *own_groups())
    try:
        return sum(_issued_on(group) for group in groups if group not in ignored)
    except (AttributeError, RuntimeError):  # a backend that doesn't count
        return None


def _issued_on(group: Any) -> int:
    """Those of every backend: a group of "cpu:gloo,cuda:nccl" has two, and its own number is that of one of them."""
    backends = [group._get_backend(device) for device in group._device_types]
    return sum(one._get_sequence_number_for_group() for one in {id(one): one for one in backends}.values())
