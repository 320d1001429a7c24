"""Forks of this process that don't touch inherited garbage and accelerators."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_memkit.utilities.garbage import keep_aside, without_collecting

_NOT_IN_FORKS = ("cuda", "xpu")
_starts = (
    threading.RLock()
)  # one thread forks at a time: libraries that know of forks refuse others meanwhile


@contextmanager
def starting() -> Iterator[bool]:
    """Disable garbage collection while forks start inside, each of which must first call `leave_inherited`.

    One thread at a time is inside. Yields whether the collector was enabled.

    A fork has only one of the original's threads. If it collected inherited garbage, it would run destructors
    that wait for the other threads: gloo's process group then waits forever. Collecting would also end the
    sharing of memory pages.
    """
    with _starts:
        collects = gc.isenabled()
        with without_collecting():
            yield collects


def leave_inherited(*, collects: bool) -> None:
    """Call it in a fork: from now on the collector only considers objects that the fork itself makes.

    Args:
        collects: whether the original's collector is enabled, queried before the fork.
    """
    global _starts
    _starts = threading.RLock()  # the original's is held
    keep_aside()
    gc.freeze()
    if collects:
        gc.enable()


def hide_accelerators() -> None:
    """Call it in a fork: from now on torch finds no accelerator, whatever the original has used.

    CUDA does not work in a fork of a process that has initialised it, for which `torch.cuda.is_available()`
    may be enough (https://docs.pytorch.org/docs/stable/notes/multiprocessing.html). Libraries query devices
    and generator states in passing (Lightning in each stage), which would raise. Custom backends
    ("privateuseone") are left unchanged.
    """
    hidden: list[tuple[Any, dict[str, Any]]] = [(torch.cuda, _of_no_device()), (torch.xpu, _of_no_device())]
    hidden.append((torch.accelerator, _of_others_than_hidden()))
    for module, functions in hidden:
        for name in functions.keys() & vars(module).keys():
            setattr(module, name, functions[name])


def _of_others_than_hidden() -> dict[str, Any]:
    """What `torch.accelerator` says of custom backends, also of one that is registered in the fork."""
    ask, is_available, device_count = (
        getattr(torch.accelerator, name) for name in ("current_accelerator", "is_available", "device_count")
    )

    def current(*args: Any, **kwargs: Any) -> torch.device | None:
        found = ask(*args, **kwargs)
        return None if found is None or found.type in _NOT_IN_FORKS else found

    return {
        "current_accelerator": current,
        "is_available": lambda: current() is not None and is_available(),
        "device_count": lambda: 0 if current() is None else device_count(),
    }


def _of_no_device() -> dict[str, Any]:
    return {
        "is_available": _no,
        "is_initialized": _no,
        "is_bf16_supported": _no,
        "device_count": _zero,
        "get_rng_state_all": _empty,
        "set_rng_state_all": _nothing,
        "manual_seed": _nothing,
        "manual_seed_all": _nothing,
        "seed_all": _nothing,
        "synchronize": _nothing,
        "empty_cache": _nothing,
        "set_per_process_memory_fraction": _nothing,  # a cap of the original's that is taken back in the fork
    }


def _no(*args: Any, **kwargs: Any) -> bool:
    return False


def _zero(*args: Any, **kwargs: Any) -> int:
    return 0


def _empty(*args: Any, **kwargs: Any) -> list[Any]:
    return []


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass
