"""Detect unknown collectives, which make it impossible to retry one rank's step."""

from typing import Any

from torch import distributed
from torch.distributed import distributed_c10d

from lightning_memkit.distributed.own_group import own_groups


def collectives_issued(*ignored: Any) -> int | None:
    """How many collectives this rank has issued on all groups except `ignored`; None if not counted.

    The difference of two calls is the number issued between them. Costs some microseconds a group.
    Collectives of threads that write checkpoints don't count, since they are no part of a step.
    """
    if not distributed.is_initialized():
        return 0
    groups: Any = getattr(getattr(distributed_c10d, "_world", None), "pg_map", None)
    if groups is None:
        return None
    ignored = (*ignored, *own_groups())
    try:
        return sum(_issued_on(group) for group in groups if group not in ignored)
    except (AttributeError, RuntimeError):  # the backend doesn't count
        return None


def _issued_on(group: Any) -> int:
    """Sum over backends: a group of "cpu:gloo,cuda:nccl" has two, and its own number is only one's."""
    backends = [group._get_backend(device) for device in group._device_types]
    return sum(one._get_sequence_number_for_group() for one in {id(one): one for one in backends}.values())
