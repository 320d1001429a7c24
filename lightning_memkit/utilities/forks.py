"""Forks of this process, which leave alone what they have inherited: its garbage and its accelerators."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_NOT_IN_FORKS = ("cuda", "xpu")


@contextmanager
def starting() -> Iterator[None]:
    """Hold the collector while forks start within it, each of which calls `leave_inherited` first; costs nothing.

    A fork has one thread of its original. Were it to collect what was garbage there already, it would run destructors
    that wait for the others: gloo's process group then waits for ever. Nor would it share the pages any more.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def leave_inherited(*, collects: bool) -> None:
    """To be called in a fork: from now on the collector sees what the fork makes itself, and nothing else.

    Args:
        collects: whether the original has its collector on, asked before it starts the fork.
    """
    gc.freeze()
    if collects:
        gc.enable()


def hide_accelerators() -> None:
    """To be called in a fork: from now on torch finds no accelerator, whatever the original has used.

    CUDA works in no fork of a process in which it was initialised, for which `torch.cuda.is_available()` may be
    enough (https://docs.pytorch.org/docs/stable/notes/multiprocessing.html). Libraries ask for devices and for the
    states of their generators in passing, Lightning in each of its stages: they would raise. A backend of somebody's
    own ("privateuseone") is left as it is.
    """
    hidden: list[tuple[Any, dict[str, Any]]] = [(torch.cuda, _of_no_device()), (torch.xpu, _of_no_device())]
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type in _NOT_IN_FORKS:
        nothing = {"is_available": _no, "device_count": _zero, "current_accelerator": _nothing}
        hidden.append((torch.accelerator, nothing))
    for module, functions in hidden:
        for name in functions.keys() & vars(module).keys():
            setattr(module, name, functions[name])


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
    }


def _no(*args: Any, **kwargs: Any) -> bool:
    return False


def _zero(*args: Any, **kwargs: Any) -> int:
    return 0


def _empty(*args: Any, **kwargs: Any) -> list[Any]:
    return []


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass
