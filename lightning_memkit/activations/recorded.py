"""What a tape records of a forward: operators, the values they wrote, and the layouts of tensors in them."""

import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_memkit.activations.operators import Kind
from lightning_memkit.activations.randomness import OperatorRandomState
from lightning_memkit.memory import recomputation
from lightning_memkit.memory.meter import tensors_in
from lightning_memkit.utilities.tensors import is_wrapper

_T = TypeVar("_T")


class Value:
    """What one operator wrote into one storage; a leaf (an input, a weight) if `operator` is None."""

    __slots__ = ("guard", "notes", "operator", "size_bytes", "storage")

    def __init__(self, operator: "Operator | None", storage: torch.UntypedStorage) -> None:
        self.operator = operator
        self.storage: torch.UntypedStorage | None = storage
        self.size_bytes = storage.nbytes()
        self.notes: list[weakref.ref[Note]] = []
        self.guard: tuple[Tensor, int] | None = None

    @property
    def pinned(self) -> bool:
        """Whether it can't be recomputed: a leaf, or the output of an operator that must not run twice."""
        return self.operator is None or self.operator.pinned

    def watch(self, tensor: Tensor) -> None:
        """From now on, notice writes to the storage of this tensor, which holds the value."""
        if not tensor.is_inference():
            alias = tensor.detach()  # it shares the version counter, and holds no graph
            self.guard = (alias, alias._version)

    def find(self) -> torch.UntypedStorage | None:
        """The storage if it is in memory: here, or in a note that autograd still holds."""
        if self.guard is not None and self.guard[0]._version != self.guard[1]:
            self.forget()
        if self.storage is not None:
            return self.storage
        return next((note.storage for note in alive(self.notes) if note.storage is not None), None)

    def forget(self) -> None:
        """Drop the storage everywhere: it was freed, or holds something else by now."""
        self.storage = self.guard = None
        for note in alive(self.notes):
            note.storage = None

    def let_autograd_hold(self) -> None:
        """Called when no operator needs the value any more: keep it only as long as a saved tensor needs it."""
        if self.pinned or self.storage is None:
            return
        notes = list(alive(self.notes))
        if any(note.storage is not None for note in notes) or not any(note.pending for note in notes):
            self.storage = self.guard = None


class ValuePlace:
    """The layout of a tensor within a value, and how it is read: as it is, conjugated, or negated."""

    __slots__ = ("conjugated", "device", "dtype", "negated", "offset", "size", "stride", "value")

    def __init__(self, value: Value, tensor: Tensor) -> None:
        self.value = value
        self.dtype, self.device = tensor.dtype, tensor.device
        self.size, self.stride, self.offset = tensor.size(), tensor.stride(), tensor.storage_offset()
        self.conjugated, self.negated = tensor.is_conj(), tensor.is_neg()

    def over(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor, over a storage of the same layout."""
        empty: Any = torch.empty(0, dtype=self.dtype, device=self.device)
        tensor = empty.set_(storage, self.offset, self.size, self.stride)
        if self.conjugated:
            tensor = torch._conj(tensor)
        return torch._neg_view(tensor) if self.negated else tensor


class Note:
    """The object that autograd holds in place of a saved tensor."""

    __slots__ = ("__weakref__", "pending", "place", "storage", "tape")

    def __init__(self, tape: Any, place: ValuePlace) -> None:
        self.tape = tape  # only notes hold the tape, so it ends with its graph
        self.place = place
        self.storage = place.value.storage
        self.pending = True

    def point_to(self, value: Value) -> None:
        """Refer to another value of the same storage, which an operator filled after autograd saved it."""
        before = self.place.value
        reference = next(reference for reference in before.notes if reference() is self)
        before.notes.remove(reference)
        value.notes.append(reference)
        self.place.value, self.storage = value, value.storage


class Operator:
    """One recorded call."""

    __slots__ = ("args", "func", "grad", "index", "inputs", "kind", "kwargs", "outputs", "pinned", "random")

    def __init__(self, func: Any, kind: Kind) -> None:
        self.index = -1
        self.func = func
        self.kind = kind
        self.args: list[Any] = []
        self.kwargs: dict[str, Any] = {}
        self.inputs: list[Value] = []
        self.outputs: list[Value | None] = []  # None if an output shares an input's storage
        self.pinned = kind.once
        self.random: OperatorRandomState | None = None
        self.grad = (
            torch.is_grad_enabled()
        )  # some kernels depend on it: oneDNN's LSTM allocates a workspace only then

    def made(self) -> list[Value]:
        """The values that it made."""
        return [value for value in self.outputs if value is not None]

    def clear(self) -> None:
        """Drop all references; the operator can't run any more."""
        for known in (self.args, self.kwargs, self.inputs, self.outputs):
            known.clear()

    def rewritten(self) -> dict[Value, torch.device]:
        """The inputs that it writes to, and their devices."""
        places = [self.args[index] for index in self.kind.written if index < len(self.args)]
        places += [value for name, value in self.kwargs.items() if name in self.kind.written_names]
        return {place.value: place.device for place in _places(places)}

    def allocates(self, out: Tensor) -> None:
        """Of its inputs it needs no contents, just to allocate such a tensor: from now on it has none."""
        self.func = torch.ops.aten.empty_strided.default
        self.args = [tuple(out.size()), tuple(out.stride())]
        self.kwargs = {"dtype": out.dtype, "device": out.device}
        self.inputs = []

    def given_to(
        self,
        use: Callable[[Callable[[], Any]], _T],
        storages: dict[Value, torch.UntypedStorage],
        spent: Container[Value] = (),
    ) -> _T:
        """The result of `use`, which gets a call on these contents; inputs that it writes, but `spent`, are copied."""
        for value, device in self.rewritten().items():
            if value not in spent:
                storages[value] = copied(storages[value], device)
        args, kwargs = _filled(self.args, storages), _filled(self.kwargs, storages)
        with (
            torch.set_grad_enabled(self.grad),
            nullcontext() if self.random is None else self.random.restored(),
        ):
            return use(lambda: self.func(*args, **kwargs))

    def outputs_of(
        self, storages: dict[Value, torch.UntypedStorage], spent: Container[Value] = ()
    ) -> list[torch.UntypedStorage]:
        """Run it on these contents of its inputs; those that it writes to, but `spent`, are copied first."""
        out = self.given_to(lambda run: run(), storages, spent)
        return [tensor.untyped_storage() for tensor in tensors_in(out) if is_plain(tensor)]

    def run(self, spent: Container[Value] = ()) -> None:
        """Run it again on its inputs, which are in memory, and store its outputs; it may overwrite `spent`."""
        storages = {value: storage for value in self.inputs if (storage := value.find()) is not None}
        recomputation.begin()
        try:
            made = self.outputs_of(storages, spent)
        finally:
            recomputation.end()
        for value, storage in zip(self.outputs, made, strict=True):
            if value is not None:
                value.storage = storage


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is one storage and a layout; sparse, nested, quantized and wrapped ones are more than that."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return False
    return type(tensor) is Tensor or not is_wrapper(tensor)


def copied(storage: torch.UntypedStorage, device: torch.device) -> torch.UntypedStorage:
    """A copy of a storage, made by an operator: meters see operators, but not what a storage does by itself."""
    whole = torch.empty(0, dtype=torch.uint8, device=device)
    return whole.set_(storage, 0, (storage.nbytes(),), (1,)).clone().untyped_storage()


def alive(references: Iterable[weakref.ref[Note]]) -> Iterator[Note]:
    """The notes that autograd still holds."""
    for reference in references:
        note = reference()
        if note is not None:
            yield note


def _places(value: Any) -> Iterator[ValuePlace]:
    if isinstance(value, ValuePlace):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _places(item)


def _filled(value: Any, storages: dict[Value, torch.UntypedStorage]) -> Any:
    if isinstance(value, ValuePlace):
        return value.over(storages[value.value])
    if isinstance(value, list):
        return [_filled(item, storages) for item in value]
    if isinstance(value, dict):
        return {name: _filled(item, storages) for name, item in value.items()}
    return value
