"""A group of all ranks for threads that write checkpoints while the ranks train."""

from typing import Any

from torch import distributed

from lightning_memkit.distributed.timeouts import host_group

_made: dict[
    int, tuple[Any, Any]
] = {}  # key: id of the default group, which is kept alive so that its id is not reused


def own_group() -> Any:
    """A gloo group of all ranks besides the training's, made at the first call; None without ranks.

    Collectives of one group pair up by their order, so a thread needs a group that nobody else uses
    meanwhile. It handles host memory only. The first call is a collective: all ranks make it at the same
    point, on their main thread.

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
    """The groups that exist; their collectives are not part of training."""
    return [group for _, group in _made.values()]
