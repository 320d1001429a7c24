"""Fake twins of real tensors, with shapes, strides and a device, but without memory."""

import sys
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._library import simple_registry
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.weak import WeakIdKeyDictionary

from lightning_memkit.memory.meter import unmetered
from lightning_memkit.prediction.fake_results import results_of
from lightning_memkit.prediction.known_results import KnownResults
from lightning_memkit.prediction.replaced import replaced
from lightning_memkit.utilities.tensors import is_wrapper

_HOST = torch.device("cpu")


class Fakes:
    """Makes one fake twin for each real tensor; twins of tensors that share memory share theirs, too.

    Twins are on the CPU whatever the device of the originals, so that the device need not exist.
    """

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.mode.cache_enabled = False  # `results` is in its place
        self.results = KnownResults(self.mode)
        self._twins: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._storages: dict[int, tuple[Any, torch.UntypedStorage]] = {}

    @contextmanager
    def opened(self, kind: Hashable) -> Iterator[None]:
        """Operators in the context take fake tensors; what they return is kept for this kind of simulation."""
        self.results.found = results_of(kind)
        with self.mode:
            yield

    def twin(self, real: Tensor) -> Tensor:
        """The fake tensor for a real one, or for one on the meta device; a fake one is its own twin."""
        if isinstance(real, FakeTensor):
            return real
        twin = self._twins.get(real)
        if twin is None:
            twin = self._twins[real] = self._made(real)
        return twin

    def known_twin(self, real: Tensor) -> Tensor | None:
        """The twin that was made of a real tensor before; None if there is none."""
        return self._twins.get(real)

    def forget_twins(self) -> None:
        """Release all twins; a real tensor that occurs again gets a new one."""
        self._twins.clear()
        self.forget_storages()

    def forget_storages(self) -> None:
        """Release the twins' storages, so that casts in place free them even if the originals live on."""
        self._storages.clear()

    def _made(self, real: Tensor) -> Tensor:
        if is_wrapper(real) or real.layout is not torch.strided:
            return self.mode.from_tensor(real)
        with unmetered(), torch.no_grad():
            bare = torch.empty(0, dtype=real.dtype, device="meta")
            bare.set_(
                self.twin_storage(real.untyped_storage()), real.storage_offset(), real.size(), real.stride()
            )
        fake = FakeTensor(self.mode, bare, _HOST)
        if isinstance(real, nn.Parameter):
            return nn.Parameter(fake, requires_grad=real.requires_grad)
        return fake.requires_grad_(real.requires_grad) if real.is_leaf else fake

    def twin_storage(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """The storage without memory that represents a real one."""
        if storage.device.type == "meta":
            return storage
        known = self._storages.get(storage._cdata)
        if known is None:
            key = storage._cdata
            ref = weakref.ref(storage, lambda _: self._storages.pop(key, None))
            known = self._storages[key] = (ref, torch.UntypedStorage(storage.nbytes(), device="meta"))
        return known[1]


def fake_in_place(module: nn.Module, fakes: Fakes) -> Iterator[tuple[Tensor, Tensor]]:
    """Give a module the twins of its parameters and buffers; yields (twin, original) of each, keeping ties.

    The module is not restored: this is for a fork or copy; see `contained`.
    """
    for submodule in module.modules():
        for tensors in (submodule._parameters, submodule._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and not isinstance(tensor, FakeTensor):
                    twin = fakes.twin(tensor)
                    tensors[name] = twin  # pyright: ignore[reportArgumentType]
                    yield twin, tensor


@contextmanager
def taken_as_real(mode: type) -> Iterator[None]:
    """Within the context, modules and libraries treat fake tensors as real ones; `mode` is the simulation's class."""
    with _casts_in_place(), _unrecognised(), _without_rules_for(mode):
        yield


@contextmanager
def _casts_in_place() -> Iterator[None]:
    """Make `Module.to` change fake parameters in place, like real ones; torch would fail to swap them."""
    before = nn.Module._apply
    nn.Module._apply = _apply
    try:
        yield
    finally:
        nn.Module._apply = before


def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    if recurse:
        for child in self.children():
            child._apply(fn)
    with torch.no_grad():
        for parameter in self._parameters.values():
            if parameter is not None:
                parameter.data = fn(parameter.data)
                if parameter.grad is not None:
                    parameter.grad.data = fn(parameter.grad.data)
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = fn(buffer)
    return self


@contextmanager
def _without_rules_for(mode: type) -> Iterator[None]:
    """Keep torch from looking, at each dispatch, for the rules that a library has for this mode: none can have any."""
    plain = simple_registry.find_torch_dispatch_rule

    def find(op: Any, torch_dispatch_class: type) -> Callable[..., Any] | None:
        return None if torch_dispatch_class is mode else plain(op, torch_dispatch_class)

    with replaced(simple_registry, find_torch_dispatch_rule=find):
        yield


@contextmanager
def _unrecognised() -> Iterator[None]:
    """Hide from transformers that tensors are fake; it would make masks that a real run does not have."""
    utils: Any = sys.modules.get("transformers.utils.import_utils")
    known = getattr(utils, "is_fake_tensor", None)
    if known is None:
        yield
        return
    utils.is_fake_tensor = lambda tensor: False
    try:
        yield
    finally:
        utils.is_fake_tensor = known
