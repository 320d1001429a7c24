"""Whether a state can be saved by several ranks, asked before any of them writes."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from lightning_memkit.checkpoints.documents import encode, refuse_tensor


def refuse_unsaveable(shares: dict[str, Any], rest: Any) -> None:
    """Raise CheckpointError for anything but plain tensors and primitives, before anything is written."""
    encode(rest)
    encode(tree_map_only(Tensor, lambda _: None, shares))
    _refuse_tensors(shares, ())


def _refuse_tensors(value: Any, path: tuple[Any, ...]) -> None:
    if isinstance(value, Tensor):
        refuse_tensor(value.to_local() if isinstance(value, DTensor) else value, path)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _refuse_tensors(item, (*path, key))
    elif isinstance(value, (list, tuple, set)):
        for number, item in enumerate(value):
            _refuse_tensors(item, (*path, number))
