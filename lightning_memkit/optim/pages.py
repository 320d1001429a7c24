"""Memory of bitsandbytes' paged states, which nothing frees: what a trial or a retry forgets is used again.

`bitsandbytes.functional.get_paged` gives CUDA's managed memory as a tensor that doesn't own it, and its manager lists
every such tensor for good. An optimizer whose states are made twice would hold them twice. Not yet verified on a GPU.
"""

from collections.abc import Iterable
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

_POOL = "_memkit_pages"


def keep_pages(optimizer: Optimizer, states: Iterable[Any]) -> None:
    """Give the pages of states that the optimizer forgets to the states that it makes next.

    Args:
        optimizer: any; one that doesn't page is left as it is.
        states: what is forgotten, a state or a value of one each.
    """
    values = [value for state in states for value in (state.values() if isinstance(state, dict) else [state])]
    pages = [value for value in values if isinstance(value, Tensor) and getattr(value, "is_paged", False)]
    if not pages:
        return
    pool: list[Any] = optimizer.__dict__.setdefault(_POOL, [])
    pool += pages
    owner = ref(optimizer)  # a reference in its own dict would make a cycle

    def get_state_buffer(parameter: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        from bitsandbytes import functional

        target: Any = owner()
        for place, page in enumerate(pool):
            fits = page.shape == parameter.shape and page.dtype == dtype
            if fits and page.page_deviceid == parameter.device.index:
                del pool[place]
                functional.fill(page, 0)
                listed = target.page_mng.paged_tensors  # a snapshot puts back what was listed before
                if not any(page is other for other in listed):
                    listed.append(page)
                return page
        return type(target).get_state_buffer(target, parameter, dtype)

    optimizer.__dict__["get_state_buffer"] = get_state_buffer
