"""Put back what a training step changes besides weights and optimizer: RNG, buffers, metrics, attributes."""

import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_OF_EVERY_MODULE = frozenset(nn.Module().__dict__) - {"training"}
_CONTAINERS = (list, dict, set, deque)


class _Generators:
    """The state of every random number generator that a step may draw from: Python, NumPy, torch's."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore(self) -> None:
        """Put all generators back."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)


class Rollback:
    """A module's mutable state before a step, to be put back exactly if the step fails or was a trial.

    It holds the RNG, buffers, `torchmetrics` states, and the attributes of every submodule with the contents
    of lists, dicts, sets and deques. Tensors are cloned only where `changing` says so, or all of them without
    it: cloning every constant mask on every step would cost what it saves.

    Args:
        module: the module that steps.
        changing: what `changed()` of an earlier rollback gave: the tensors that steps do change in place.
    """

    def __init__(self, module: nn.Module, changing: frozenset[tuple[str, str]] | None = None) -> None:
        self._random = _Generators()
        self._modules = dict(module.named_modules())
        self._attributes: dict[str, dict[str, Any]] = {}
        self._contents: list[tuple[Any, Any]] = []
        self._tensors: dict[tuple[str, str], tuple[Tensor, int, Tensor | None]] = {}
        for path, owner in self._modules.items():
            kept = {key: value for key, value in vars(owner).items() if key not in _OF_EVERY_MODULE}
            self._attributes[path] = kept
            for value in kept.values():
                if type(value) in _CONTAINERS:
                    self._contents.append((value, value.copy()))
            for name, tensor in _mutable_tensors(owner):
                key = (path, name)
                clone = tensor.detach().clone() if changing is None or key in changing else None
                self._tensors[key] = (tensor, tensor._version, clone)

    def changed(self) -> frozenset[tuple[str, str]]:
        """The tensors that were changed in place, or replaced, since."""
        return frozenset(
            key
            for key, (tensor, version, clone) in self._tensors.items()
            if _lookup(self._modules[key[0]], key[1]) is not tensor or _differs(tensor, version, clone)
        )

    def restore(self) -> frozenset[tuple[str, str]]:
        """Put everything back; returns the tensors that changed but were not cloned (empty: it is exact)."""
        lost = []
        for (path, name), (tensor, version, clone) in self._tensors.items():
            owner = self._modules[path]
            if name in owner._buffers:
                owner._buffers[name] = tensor
            if not _differs(tensor, version, clone):
                continue
            if clone is None:
                lost.append((path, name))
                continue
            with torch.no_grad():
                tensor.copy_(clone)
        for path, kept in self._attributes.items():
            values = vars(self._modules[path])
            for key in [key for key in values if key not in _OF_EVERY_MODULE and key not in kept]:
                del values[key]
            values.update(kept)
        for container, contents in self._contents:
            _refill(container, contents)
        self._random.restore()
        return frozenset(lost)


def _differs(tensor: Tensor, version: int, clone: Tensor | None) -> bool:
    """Whether a tensor was changed in place; without a clone its version tells, where the kernel counts it."""
    # Batch normalization's kernel updates its running statistics without counting a version.
    return tensor._version != version if clone is None else not torch.equal(tensor, clone)


def _mutable_tensors(owner: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers, and tensors that are plain attributes (where torchmetrics keeps its states)."""
    for name, buffer in owner._buffers.items():
        if buffer is not None:
            yield name, buffer
    for name, value in vars(owner).items():
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            yield name, value


def _lookup(owner: nn.Module, name: str) -> Any:
    return owner._buffers[name] if name in owner._buffers else vars(owner).get(name)


def _refill(container: Any, contents: Any) -> None:
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(contents)
    else:
        container.update(contents)
