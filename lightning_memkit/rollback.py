"""Put back what a training step changes besides weights and optimizer: RNG, buffers, metrics, attributes."""

import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_OF_EVERY_MODULE = frozenset(nn.Module().__dict__) - {"training"}
_CONTAINERS = (list, dict, set, deque)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class Generators:
    """The state of every global random number generator that a step may draw from: Python, NumPy, torch's."""

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

    It holds the global RNG, buffers, forward hooks, `torchmetrics` states, and the attributes of every submodule: also
    what their lists, dicts, sets and deques hold, at any depth, with tensors, arrays, generators and modules in them.
    Plain objects of the user's own classes are not looked into.

    Buffers and attributes that are tensors are cloned only where `changing` says so, or all of them without it:
    cloning every constant mask on every step would cost what it saves.

    Args:
        module: the module that steps.
        changing: what `changed()` of an earlier rollback gave: the tensors that steps do change in place.
    """

    def __init__(self, module: nn.Module, changing: frozenset[tuple[str, str]] | None = None) -> None:
        self._random = Generators()
        self._changing = changing
        self._modules: dict[str, nn.Module] = {}
        self._attributes: dict[str, dict[str, Any]] = {}
        self._buffers: dict[str, dict[str, Tensor | None]] = {}
        self._hooks: list[tuple[Any, Any]] = []
        self._contents: list[tuple[Any, Any]] = []
        self._tensors: dict[tuple[str, str], tuple[Tensor, int, Tensor | None]] = {}
        self._seen: set[int] = set()
        for path, owner in module.named_modules():
            self._keep_module(path, owner)

    def changed(self) -> frozenset[tuple[str, str]]:
        """The tensors that were changed in place, or replaced, since."""
        return frozenset(
            key
            for key, (tensor, version, clone) in self._tensors.items()
            if _lookup(self._modules[key[0]], key[1]) is not tensor or _differs(tensor, version, clone)
        )

    def replaced(self) -> list[str]:
        """The attributes that were set since, and hold tensors: what a step hands on to the next."""
        return [
            f"{path}.{key}".lstrip(".")
            for path, kept in self._attributes.items()
            for key, value in vars(self._modules[path]).items()
            if key not in _OF_EVERY_MODULE and value is not kept.get(key) and _holds_tensors(value)
        ]

    def restore(self) -> frozenset[tuple[str, str]]:
        """Put everything back; returns the tensors that changed but were not cloned (empty: it is exact)."""
        lost = []
        for key, (tensor, version, clone) in self._tensors.items():
            if not _differs(tensor, version, clone):
                continue
            if clone is None:
                lost.append(key)
                continue
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.copy_(clone)
        for path, kept in self._attributes.items():
            values = vars(self._modules[path])
            for key in [key for key in values if key not in _OF_EVERY_MODULE and key not in kept]:
                del values[key]
            values.update(kept)
        for path, buffers in self._buffers.items():
            self._modules[path]._buffers.clear()
            self._modules[path]._buffers.update(buffers)
        for hooks, before in self._hooks:
            if list(hooks) != list(before):
                hooks.clear()
                hooks.update(before)
        for container, contents in reversed(self._contents):
            _refill(container, contents)
        self._random.restore()
        return frozenset(lost)

    def _keep_module(self, path: str, owner: nn.Module) -> None:
        if id(owner) in self._seen:
            return
        self._seen.add(id(owner))
        self._modules[path] = owner
        self._buffers[path] = dict(owner._buffers)
        kept = {key: value for key, value in vars(owner).items() if key not in _OF_EVERY_MODULE}
        self._attributes[path] = kept
        # A first forward that notes in an attribute that it has hooked its layers would hook them once more.
        hooks = (value for name, value in vars(owner).items() if name.startswith(_HOOKS))
        self._hooks += [(value, value.copy()) for value in hooks]
        for name, tensor in _mutable_tensors(owner):
            self._keep_tensor((path, name), tensor)
        for name, value in kept.items():
            if isinstance(value, (*_CONTAINERS, np.ndarray, torch.Generator)):
                self._keep_contents(f"{path}.{name}", value)

    def _keep_tensor(self, key: tuple[str, str], tensor: Tensor) -> None:
        inference = tensor.is_inference()  # such tensors count no versions
        wanted = self._changing is None or key in self._changing or inference
        clone = tensor.detach().clone() if wanted else None
        self._tensors[key] = (tensor, 0 if inference else tensor._version, clone)

    def _keep_contents(self, path: str, value: Any) -> None:
        """What a container, an array or a generator holds; containers at any depth."""
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, (np.ndarray, torch.Generator)):
            kept = value.copy() if isinstance(value, np.ndarray) else value.get_state()
            self._contents.append((value, kept))
            return
        items = list(value.values()) if isinstance(value, dict) else list(value)
        self._contents.append((value, dict(value) if isinstance(value, dict) else list(value)))
        for index, item in enumerate(items):
            if isinstance(item, nn.Module):
                for below, child in item.named_modules():
                    self._keep_module(f"{path}[{index}].{below}", child)
            elif isinstance(item, Tensor) and not isinstance(item, nn.Parameter) and not item.requires_grad:
                self._contents.append((item, item.detach().clone()))
            elif isinstance(item, (*_CONTAINERS, np.ndarray, torch.Generator)):
                self._keep_contents(f"{path}[{index}]", item)


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


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))


def _lookup(owner: nn.Module, name: str) -> Any:
    return owner._buffers[name] if name in owner._buffers else vars(owner).get(name)


def _refill(container: Any, contents: Any) -> None:
    """Give a mutable value its kept contents back, in place."""
    if isinstance(container, Tensor):
        if not torch.equal(container, contents):
            with torch.inference_mode(container.is_inference()), torch.no_grad():
                container.copy_(contents)
    elif isinstance(container, np.ndarray):
        container[...] = contents
    elif isinstance(container, torch.Generator):
        container.set_state(contents)
    else:
        container.clear()
        if isinstance(container, (list, deque)):
            container.extend(contents)
        else:
            container.update(contents)
