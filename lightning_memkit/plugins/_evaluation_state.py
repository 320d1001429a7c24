"""What evaluation steps leave in a module besides metrics' results: numbers, tensors, what lists gain."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_memkit.micro_batching.changes.rollback import Rollback
from lightning_memkit.micro_batching.parts.joining import Change

Key = tuple[Any, ...]  # the module's path, the attribute's name, then keys or indices below it

_NUMBERS = (bool, int, float, np.number)
_LARGEST_BUFFER = 2**22  # elements; steps don't write into larger ones: they are masks and tables
_FEW, _SMALL = 64, 4096


class _Items:
    """A list, and what it held."""

    def __init__(self, owner: list[Any]) -> None:
        self.owner = owner
        self.items = list(owner)


def snapshot(module: nn.Module, only: frozenset[Key] | None = None) -> dict[Key, Any]:
    """Numbers, copies of tensors, and the items of lists that a module's attributes hold; some keys alone."""
    if only is not None and not only:
        return {}
    return {key: _kept(value) for key, value in _state(module) if only is None or key in only}


def tensors_kept(module: nn.Module) -> Iterator[Tensor]:
    """The tensors that a module's attributes hold besides parameters and buffers: states of metrics, outputs."""
    for _, value in _state(module):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list):
            yield from (item for item in value if isinstance(item, Tensor))


def changes(before: dict[Key, Any], after: dict[Key, Any], keys: frozenset[Key]) -> dict[Key, Any]:
    """What a step did to some keys: a `Change`, or the items that a list has gained."""
    done: dict[Key, Any] = {}
    for key in keys:
        old, new = before.get(key), after.get(key)
        if isinstance(new, _Items):
            done[key] = new.items[len(old.items) if isinstance(old, _Items) else 0 :]
        else:
            done[key] = Change(before=old, after=new)
    return done


def changed(before: dict[Key, Any], after: dict[Key, Any]) -> frozenset[Key]:
    """The keys that are not as they were."""
    return frozenset(
        key
        for key, value in after.items()
        if not _alike(before.get(key), value)
        and not (
            key not in before and isinstance(after.get(key[:-1]), _Items)
        )  # the list's own entry tells it
    )


def write_back(module: nn.Module, before: dict[Key, Any], joined: dict[Key, Any]) -> None:
    """Give a module what the unsplit batch would have left in it."""
    for key, value in joined.items():
        if isinstance(value, list):
            owner, kept = _lookup(module, key), before.get(key)
            owner[len(kept.items) if isinstance(kept, _Items) else 0 :] = value
            continue
        path, name, *below = key
        owner: Any = module.get_submodule(path)
        if not below:
            setattr(owner, name, value)
            continue
        _lookup(module, key[:-1])[below[-1]] = value


class EvaluationRollback(Rollback):
    """A `Rollback` that does not copy what a module has gathered over the batches before.

    Of tensors in lists and dicts those that are few and small are copied (64 a container, 4096 elements each:
    sums and counts); the others are outputs that are gathered, and no step writes into them. torch's own layers
    without buffers are passed over: a step does not change their settings.
    """

    def _keep_module(self, path: str, owner: nn.Module) -> None:
        if owner._buffers or not type(owner).__module__.startswith("torch.nn.modules."):
            super()._keep_module(path, owner)

    def _looks_into(self, container: Any) -> bool:
        items = list(container.values()) if isinstance(container, dict) else list(container)
        tensors = [item for item in items if isinstance(item, Tensor)]
        return len(tensors) <= _FEW and all(tensor.numel() <= _SMALL for tensor in tensors)


@cache
def _names_of_every_module() -> frozenset[str]:
    return frozenset(vars(LightningModule())) | frozenset(vars(nn.Module()))


def _state(module: nn.Module) -> Iterator[tuple[Key, Any]]:
    for path, owner in module.named_modules():
        metric_states: Any = getattr(
            owner, "_defaults", None
        )  # torchmetrics keeps more than states in attributes
        for name, value in [*vars(owner).items(), *owner._buffers.items()]:
            if name in _names_of_every_module() or isinstance(value, nn.Parameter):
                continue
            if isinstance(metric_states, dict) and name.startswith("_"):
                continue
            yield from _values((path, name), value)


def _values(key: Key, value: Any) -> Iterator[tuple[Key, Any]]:
    if isinstance(value, (*_NUMBERS, np.ndarray)):
        yield key, value
    elif isinstance(value, Tensor):
        if value.numel() <= _LARGEST_BUFFER and not value.requires_grad:
            yield key, value
    elif isinstance(value, list):
        yield key, value
        for index, item in enumerate(value[:_FEW]):
            yield from _values((*key, index), item)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _values((*key, name), item)


def _kept(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    return _Items(value) if isinstance(value, list) else value


def _alike(a: Any, b: Any) -> bool:
    if isinstance(b, _Items):
        return isinstance(a, _Items) and len(a.items) == len(b.items)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.array_equal(a, b)  # pyright: ignore[reportArgumentType]
    return type(a) is type(b) and bool(a == b or (a != a and b != b))


def _lookup(module: nn.Module, key: Key) -> Any:
    path, name, *below = key
    found: Any = getattr(module.get_submodule(path), name)
    for part in below:
        found = found[part]
    return found
