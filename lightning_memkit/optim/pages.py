"""Reuses the memory of bitsandbytes' paged states, which is never freed, after a trial or a retry.

`bitsandbytes.functional.get_paged` returns CUDA managed memory as a tensor that does not own it. An optimizer
whose states are created twice would allocate them twice. Not yet verified on a GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

_POOL = "_memkit_pages"


@contextmanager
def pages_used_again(optimizer: Optimizer) -> Iterator[None]:
    """Pages of states that are removed within the context serve the states that the optimizer creates next.

    Args:
        optimizer: any; one that does not page is left alone.
    """
    if not getattr(optimizer, "is_paged", False):
        yield
        return
    before = _pages_of(optimizer)
    try:
        yield
    finally:
        kept = set(map(id, _pages_of(optimizer)))
        _offer(optimizer, [page for page in before if id(page) not in kept])


def _pages_of(optimizer: Optimizer) -> list[Tensor]:
    states = [state for state in optimizer.state.values() if isinstance(state, dict)]
    values = [value for state in states for value in state.values()]
    return [value for value in values if isinstance(value, Tensor) and getattr(value, "is_paged", False)]


def _offer(optimizer: Optimizer, pages: list[Tensor]) -> None:
    """Make the optimizer take these pages before it allocates others."""
    pool: list[Any] = optimizer.__dict__.setdefault(_POOL, [])
    pool += pages
    owner = ref(optimizer)  # a strong reference in its own dict would make a cycle

    def get_state_buffer(parameter: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        from bitsandbytes import functional

        target: Any = owner()
        for place, page in enumerate(pool):
            fits = page.shape == parameter.shape and page.dtype == dtype
            if fits and page.page_deviceid == parameter.device.index:
                del pool[place]
                functional.fill(page, 0)
                listed = target.page_mng.paged_tensors  # restoring a snapshot may have listed the page again
                if not any(page is other for other in listed):
                    listed.append(page)
                return page
        return type(target).get_state_buffer(target, parameter, dtype)

    optimizer.__dict__["get_state_buffer"] = get_state_buffer
