"""A forward recorded as a list of its operators, any of which can be recomputed in the backward pass.

A note of its layout replaces each tensor that autograd would save. Outputs that the caller keeps stay in
memory; the others are recomputed from them when the backward needs them: only the operators that are needed,
each once, in the order of the forward. Python code does not run again, so branches, caches, counters and
routing decisions are those of the forward.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memkit.activations.operators import Kind, kind_of
from lightning_memkit.activations.randomness import OperatorRandomState
from lightning_memkit.activations.recorded import Note, Operator, Value, ValuePlace, alive, copied, is_plain
from lightning_memkit.memory.meter import tensors_in

# Python's overhead per operator, measured on one core of an AMD EPYC: with a GPU, the host may be the
# bottleneck.
RECORDING_SECONDS, RUNNING_AGAIN_SECONDS = 26e-6, 18e-6

_LOST = (
    "An input of a checkpointed block was changed in place between forward and backward, so that the block can't be "
    "recomputed; change it after backward(), or leave the block out of activation checkpointing."
)


class Tape(TorchDispatchMode):
    """Records the operators of one forward; costs some microseconds an operator.

    Args:
        keep: called once for each operator, right after it ran; if it returns False, the outputs are dropped
            at once.
    """

    def __init__(self, keep: Callable[[Operator], bool]) -> None:
        super().__init__()
        self.operators: list[Operator] = []
        self.notes: list[weakref.ref[Note]] = []
        self._keep = keep
        self._values: dict[int, Value] = {}
        # Weak references that keep the addresses of freed storages from being reused.
        self._addresses: list[StorageWeakRef] = []
        self._waited_for: set[Value] = set()
        self._just_saved: list[Note] = []  # notes made since the previous operator
        self._default_dtype = torch.get_default_dtype()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's wrapper against dynamo would cost as much as everything else

    def record(self, run: Callable[[], Any], inputs: Iterable[Tensor] = ()) -> Any:
        """Run a forward on the tape; if `inputs` are changed before the backward pass, this will be noticed."""
        for tensor in inputs:
            self._value(tensor).watch(tensor)
        with saved_tensors_hooks(self._pack, self._unpack), self:
            return run()

    def finish(self, outputs: Iterable[Tensor] = ()) -> None:
        """After the forward: drop everything that neither autograd nor a later recomputation needs."""
        for tensor in outputs:
            value = self._values.get(tensor.untyped_storage()._cdata)
            if value is not None and value.operator is not None and value.storage is not None:
                value.watch(tensor)  # if others write to it, it must be recomputed
        self._values.clear()
        self._addresses.clear()
        self._just_saved.clear()  # notes refer to their tape, so it would keep itself alive
        later = self.closure(self._pending())
        self._waited_for = {value for operator in later for value in operator.inputs}
        for operator in self.operators:
            for value in operator.made():
                if value not in self._waited_for:
                    value.storage = None

    def release(self, keep: Callable[[Operator], bool]) -> None:
        """Drop outputs that were kept, as if `keep` had returned False for them."""
        for operator in self.operators:
            if not (operator.pinned or keep(operator)):
                for value in operator.made():
                    value.forget()

    def __del__(self) -> None:
        # Operators and values refer to each other: without this, the inputs of blocks would live until
        # garbage collection.
        for operator in self.operators:
            operator.clear()

    # --- recording -------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = kind_of(func)
        if kind.view:
            return func(*args, **(kwargs or {}))
        operator = Operator(func, kind)
        operator.args = [self._described(value, operator.inputs) for value in args]
        if kwargs:
            operator.kwargs = {
                name: self._described(value, operator.inputs) for name, value in kwargs.items()
            }
        if kind.random:
            operator.random = OperatorRandomState.of((args, kwargs))
        written = _written(kind, args, kwargs) if kind.written_names else {}
        for key, tensor in written.items():
            self._before_write(self._values[key], tensor.device)
        out = func(*args, **(kwargs or {}))
        if kind.unfilled and is_plain(out):
            operator.allocates(out)
        if not all(map(is_plain, tensors_in((args, *(kwargs or {}).values(), out)))):
            operator.pinned = True  # a sparse tensor is known by reference only, and may have changed by then
        self._after(operator, out, written)
        self._just_saved.clear()
        return out

    def _described(self, value: Any, inputs: list[Value]) -> Any:
        if isinstance(value, Tensor) and is_plain(value):
            known = self._value(value)
            inputs.append(known)
            return ValuePlace(known, value)
        if isinstance(value, (list, tuple)):
            return [self._described(item, inputs) for item in value]
        return value

    def _value(self, tensor: Tensor) -> Value:
        storage = tensor.untyped_storage()
        value = self._values.get(storage._cdata)
        if value is None:
            value = self._values[storage._cdata] = Value(None, storage)
        return value

    def _before_write(self, value: Value, device: torch.device) -> None:
        # A value that can be recomputed is dropped. A buffer or an input is copied: its readers need the old
        # contents.
        storage = value.find() if value.pinned else None
        copy = None if storage is None else copied(storage, device)
        value.forget()
        value.storage = copy

    def _after(self, operator: Operator, out: Any, written: dict[int, Tensor]) -> None:
        left = dict(written)
        for tensor in filter(is_plain, tensors_in(out)):
            storage = tensor.untyped_storage()
            key = storage._cdata
            known = self._values.get(key)
            if known is None or (key in left and known.operator is not None):
                if known is None:
                    self._addresses.append(StorageWeakRef(storage))
                self._values[key] = value = Value(operator, storage)
                left.pop(key, None)
                operator.outputs.append(value)
            else:
                operator.outputs.append(None)  # a view that its schema does not declare, or a written leaf
        for key, tensor in left.items():  # a written leaf stays a leaf, with new contents
            before, now = self._values[key], Value(None, tensor.untyped_storage())
            self._values[key] = now
            for note in self._just_saved:
                if note.place.value is before:  # autograd saves rrelu's noise before the operator fills it
                    note.point_to(now)
        if not operator.made():
            return
        operator.index = len(self.operators)
        self.operators.append(operator)
        rewritten = operator.rewritten() if written else ()
        for value in operator.inputs:
            if value not in rewritten:
                _pin_unfilled(value)
        if not (operator.pinned or operator.kind.unfilled or self._keep(operator)):
            for value in operator.made():
                value.storage = None

    # --- what autograd saves ---------------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> Any:
        if not is_plain(tensor):
            return tensor
        value = self._values.get(tensor.untyped_storage()._cdata)
        if value is None or value.operator is None:
            return tensor
        _pin_unfilled(value)
        note = Note(self, ValuePlace(value, tensor))
        reference = weakref.ref(note)
        value.notes.append(reference)
        self.notes.append(reference)
        self._just_saved.append(note)
        return note

    def _unpack(self, saved: Any) -> Tensor:
        if not isinstance(saved, Note):
            return saved
        value = saved.place.value
        storage = value.find()
        if storage is None:
            self.make([value])
            storage = value.find()
            assert storage is not None
        saved.pending = False
        if value not in self._waited_for:
            value.let_autograd_hold()
        return saved.place.over(storage)

    # --- running again ---------------------------------------------------------------------------------------

    def closure(self, values: Iterable[Value]) -> list[Operator]:
        """The operators to run, in order, until these values are all in memory."""
        needed: set[Operator] = set()
        waiting = list(values)
        while waiting:
            value = waiting.pop()
            if value.operator in needed or value.find() is not None:
                continue
            if value.operator is None or value.operator.pinned:
                raise RuntimeError(_LOST)
            needed.add(value.operator)
            waiting.extend(value.operator.inputs)
        return sorted(needed, key=lambda operator: operator.index)

    def make(self, values: Iterable[Value]) -> None:
        """Run the operators that these values need; each output is freed as soon as nothing needs it."""
        wanted = set(values)
        batch = self.closure(wanted)
        later = set(self.closure(self._pending())).difference(batch)
        self._waited_for = {value for operator in later for value in operator.inputs}
        readers = Counter(value for operator in batch for value in set(operator.inputs))
        keep = self._waited_for | wanted
        with _below_autograd(batch, self._default_dtype):
            for operator in batch:
                readers.subtract(set(operator.inputs))
                spent = [
                    value for value in operator.rewritten() if readers[value] <= 0 and _is_spare(value, keep)
                ]
                operator.run(spent)
                for value in spent:
                    value.forget()
                for value in {*operator.made(), *operator.inputs} - keep:
                    if readers[value] <= 0:
                        value.let_autograd_hold()

    def below_autograd(self) -> AbstractContextManager[None]:
        """The context in which a recorded operator is recomputed."""
        return _below_autograd(self.operators, self._default_dtype)

    def _pending(self) -> list[Value]:
        notes = list(alive(self.notes))
        if notes and not any(note.pending for note in notes):
            for note in notes:  # a retained graph starts its next backward
                note.pending = True
        return [note.place.value for note in notes if note.pending]


def _is_spare(value: Value, keep: set[Value]) -> bool:
    """Whether a value, when its last reader has run, may be overwritten: it was made again for that one only."""
    return not value.pinned and value not in keep and not any(alive(value.notes))


def _pin_unfilled(value: Value) -> None:
    # It was read before any recorded operator wrote to it, so a kernel that is not seen here has filled it.
    if value.operator is not None and value.operator.kind.unfilled:
        value.operator.pinned = True


def _written(kind: Kind, args: tuple, kwargs: dict[str, Any] | None) -> dict[int, Tensor]:
    values = [args[index] for index in kind.written if index < len(args)]
    values += [value for name, value in (kwargs or {}).items() if name in kind.written_names]
    return {tensor.untyped_storage()._cdata: tensor for tensor in tensors_in(values) if is_plain(tensor)}


@contextmanager
def _below_autograd(operators: list[Operator], default_dtype: torch.dtype) -> Iterator[None]:
    """Run as operators do below autograd and autocast, with the forward's default dtype."""
    devices = {
        place.device.type
        for operator in operators
        for place in operator.args
        if isinstance(place, ValuePlace)
    }
    before = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for device in devices:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if before != default_dtype:
            stack.callback(torch.set_default_dtype, before)
            torch.set_default_dtype(default_dtype)
        yield
