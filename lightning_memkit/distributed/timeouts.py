"""Every group of ranks that we make has the timeout of the one that they train with, and says what it waited for."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch import distributed
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

_ALMOST = 0.9  # of the timeout: a rank may hear of it from a peer that began to wait a little earlier


class RankTimeoutError(RuntimeError):
    """A rank waited for another one for as long as the strategy allows."""


def timeout_of(group: Any = None) -> timedelta | None:
    """How long a group's collectives wait for a rank, as it was set; None where its backend doesn't tell.

    Args:
        group: None: the default one, to which Lightning's strategies give their `timeout`.
    """
    group = distributed.group.WORLD if group is None else group
    found = []
    for device in getattr(group, "_device_types", ()):
        options = getattr(group._get_backend(device), "options", None)
        found.append(getattr(options, "_timeout", None))
    return min((one for one in found if isinstance(one, timedelta)), default=None)


def host_group() -> Any:
    """A gloo group of all ranks with the default group's timeout; making it is a collective.

    Without it torch waits 30 minutes for a rank that stands still, whatever the strategy's timeout.
    """
    return distributed.new_group(backend="gloo", timeout=timeout_of())


def give_timeout(mesh: DeviceMesh) -> None:
    """Give the groups of a mesh the default group's timeout: torch makes them with its own."""
    timeout, default = timeout_of(), distributed.group.WORLD
    for group in mesh.get_all_groups():
        if timeout is not None and group is not default:
            distributed_c10d._set_pg_timeout(timeout, group)


@contextmanager
def waiting_for_ranks(purpose: str, group: Any = None) -> Iterator[None]:
    """Say what was waited for, and how long, where a collective within it ends by its timeout.

    Args:
        purpose: what the ranks do together, as in "while the ranks agreed on ...".
        group: of the collective; None: the default one.

    Raises:
        RankTimeoutError: in the place of the backend's error, which names addresses and no remedy.
    """
    began = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        limit, waited = timeout_of(group), time.monotonic() - began
        if limit is None or waited < _ALMOST * limit.total_seconds():  # a peer is gone, say
            raise
        raise RankTimeoutError(
            f"Rank {distributed.get_rank()} waited {waited:.0f} s for another rank while {purpose}; the strategy's "
            f"timeout is {limit.total_seconds():g} s. The rank that stands still is the one whose log has no such "
            "error: `py-spy dump --pid` shows where. If it is only slow, give the strategy a larger one: "
            "timeout=timedelta(minutes=...)."
        ) from error
