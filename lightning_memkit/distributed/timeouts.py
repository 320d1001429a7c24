"""Give every group of ranks that we make the training's timeout, and say for what a rank has waited."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch import distributed
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

_ALMOST = 0.9  # of the timeout: a peer that began to wait a little earlier may end the wait
_SAID = ("timed out", "timeout")  # by gloo and NCCL


class RankTimeoutError(RuntimeError):
    """A rank waited for another one for the whole of the strategy's timeout."""


def timeout_of(group: Any = None) -> timedelta | None:
    """The timeout of a group's collectives; None if its backend doesn't tell.

    Args:
        group: None for the default group, to which Lightning's strategies give their `timeout`.
    """
    group = distributed.group.WORLD if group is None else group
    found = []
    for device in getattr(group, "_device_types", ()):
        options = getattr(group._get_backend(device), "options", None)
        found.append(getattr(options, "_timeout", None))
    return min((one for one in found if isinstance(one, timedelta)), default=None)


def host_group() -> Any:
    """A gloo group of all ranks with the default group's timeout; creating it is a collective.

    With torch's default, ranks would wait 30 minutes for one that hangs, whatever the strategy's timeout.
    """
    return distributed.new_group(backend="gloo", timeout=timeout_of())


def give_timeout(mesh: DeviceMesh) -> None:
    """Give a mesh's groups the default group's timeout: torch creates them with its own."""
    timeout, default = timeout_of(), distributed.group.WORLD
    for group in mesh.get_all_groups():
        if timeout is not None and group is not default:
            distributed_c10d._set_pg_timeout(timeout, group)


@contextmanager
def waiting_for_ranks(purpose: str, group: Any = None, *, computes: bool = False) -> Iterator[None]:
    """If a collective inside times out, raise an error that says for what the ranks waited, and how long.

    Args:
        purpose: what the ranks do together, to complete "while ...", such as "the ranks agreed on ...".
        group: the collective's group; None for the default one.
        computes: other work is inside, too, which may fail after as long a time: the error has to speak of a timeout.

    Raises:
        RankTimeoutError: instead of the backend's error, which gives addresses but no remedy.
    """
    began = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        limit, waited = timeout_of(group), time.monotonic() - began
        if limit is None or waited < _ALMOST * limit.total_seconds():  # no timeout: a peer may be gone
            raise
        if isinstance(error, RankTimeoutError) or (
            computes and not any(one in str(error).lower() for one in _SAID)
        ):
            raise
        raise RankTimeoutError(
            f"Rank {distributed.get_rank()} waited {waited:.0f} s for another rank while {purpose}; the strategy's "
            f"timeout is {limit.total_seconds():g} s. The rank that stands still is the one whose log has no such "
            "error: `py-spy dump --pid` shows where. If it is only slow, give the strategy a larger one: "
            "timeout=timedelta(minutes=...)."
        ) from error
