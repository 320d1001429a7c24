"""A group of all ranks for threads that write while the ranks train."""

from typing import Any

from torch import distributed

from lightning_memkit.distributed.timeouts import host_group

_made: dict[
    int, tuple[Any, Any]
] = {}  # by the process's default group, which is kept so that its id stays its own


def own_group() -> Any:
    """A gloo group of all ranks beside those that train, made at the first call; None without ranks.

    Collectives of one group pair up by their order, so a thread needs one that nobody else uses meanwhile. It moves
    host memory only. The first call is a collective: all ranks make it at the same point, on their main thread.

    Raises:
        RuntimeError: torch was built without gloo.
    """
    if not distributed.is_initialized():
        return None
    default = distributed.group.WORLD
    if id(default) not in _made:
        if not distributed.is_gloo_available():
            raise RuntimeError(
                "A thread that writes what ranks have sharded needs gloo, and this torch was built without it; set "
                "asynchronous=False, or install a torch with gloo."
            )
        _made.clear()
        _made[id(default)] = (default, host_group())
    return _made[id(default)][1]


def own_groups() -> list[Any]:
    """Those that are there: what runs on them is none of the training's."""
    return [group for _, group in _made.values()]
