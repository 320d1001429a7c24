"""Copies of small tensors that no step has changed so far: made once, and used if a step is the first to do so."""

import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_memkit.memory.meter import unmetered
from lightning_memkit.micro_batching.changes.alike import BITS
from lightning_memkit.micro_batching.changes.still_modules import StillModules
from lightning_memkit.utilities.tensors import is_wrapper, storage_is_freed

_COMPARED_BYTES = 2**14  # of a tensor on the host, whose values are compared in every step
_MOST_COMPARED = 256  # tensors
# Of one tensor, which something outside of the step changes: the optimizer, if it is trained.
_MOST_COPIES = 3


@dataclass(kw_only=True)
class _TensorCopy:
    tensor: Any  # a weak reference
    address: int
    version: int
    copy: Tensor | None
    pair: tuple[Tensor, Tensor] | None
    copies: int = 1


@dataclass(kw_only=True)
class _ArrayCopy:
    array: Any  # a weak reference
    checksum: int
    copy: np.ndarray | None
    copies: int = 1


class SpareCopies:
    """Copies on the host of tensors that stay as they are; each costs its bytes once, and no time in further steps.

    What is trained changes in every step, and is given up after a few. A parameter that gets no gradient, such as a
    teacher's that nobody has frozen, stays.

    Args:
        most_bytes: of all copies together.

    Attributes:
        modules: by path, what the last step has kept of modules of which the next one may take it over.
    """

    def __init__(self, most_bytes: int) -> None:
        self.modules: StillModules = {}
        self._left = most_bytes
        self._entries: dict[int, _TensorCopy] = {}
        self._arrays: dict[int, _ArrayCopy] = {}

    def of(self, tensor: Tensor) -> Tensor | None:
        """A copy of a tensor's values of now; None where it is too large, or often changed."""
        if tensor.is_inference() or is_wrapper(tensor):
            return None
        if tensor.layout is not torch.strided or tensor.is_meta or storage_is_freed(tensor):
            return None
        entry = self._entries.get(id(tensor))
        if entry is None or entry.tensor() is not tensor:
            if tensor.nbytes > self._left:
                return None
            self._left -= tensor.nbytes
            entry = _TensorCopy(
                tensor=weakref.ref(tensor),
                address=tensor.data_ptr(),
                version=tensor._version,
                copy=None,
                pair=None,
            )
            self._entries[id(tensor)] = entry
            self._fill(entry, tensor)
        elif entry.copy is not None and not self._holds(entry, tensor):
            entry.copies += 1
            entry.address, entry.version = tensor.data_ptr(), tensor._version
            self._fill(entry, tensor)
            if entry.copy is None:
                self._left += tensor.nbytes
        return entry.copy

    def _fill(self, entry: _TensorCopy, tensor: Tensor) -> None:
        entry.copy = _copy_of(tensor) if entry.copies <= _MOST_COPIES else None
        entry.pair = None
        if entry.copy is not None and len(self._entries) <= _MOST_COMPARED:
            entry.pair = _bits_of(entry.copy, tensor.detach())

    def of_array(self, owner: np.ndarray, checksum: int) -> np.ndarray | None:
        """A copy of an array's values of now, whose checksum this is; None where it is often changed otherwise."""
        entry = self._arrays.get(id(owner))
        if entry is None or entry.array() is not owner:
            if owner.nbytes > self._left:
                return None
            self._left -= owner.nbytes
            entry = _ArrayCopy(array=weakref.ref(owner), checksum=checksum, copy=owner.copy())
            self._arrays[id(owner)] = entry
        elif entry.checksum != checksum and entry.copy is not None:
            entry.copies += 1
            entry.copy = owner.copy() if entry.copies <= _MOST_COPIES else None
            entry.checksum = checksum
        return entry.copy

    def pair(self, tensor: Tensor) -> tuple[Tensor, Tensor] | None:
        """The bits of a copy and of its tensor, if they are compared in every step: writes to `.data` are seen."""
        return self._entries[id(tensor)].pair

    def _holds(self, entry: _TensorCopy, tensor: Tensor) -> bool:
        if entry.version != tensor._version or entry.address != tensor.data_ptr() or entry.copy is None:
            return False
        return entry.pair is None or torch.equal(*entry.pair)


def _bits_of(copy: Tensor, tensor: Tensor) -> tuple[Tensor, Tensor] | None:
    """Both as integers, where comparing them costs microseconds; nan equals nan."""
    bits = BITS.get(tensor.element_size())
    if tensor.device != copy.device or tensor.nbytes > _COMPARED_BYTES or bits is None or tensor.is_quantized:
        return None
    return copy.view(bits), tensor.view(bits)


def _copy_of(tensor: Tensor) -> Tensor:
    with unmetered(), torch.no_grad():
        return tensor.detach().to("cpu", copy=True)
