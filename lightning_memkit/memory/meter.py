"""Count live tensor bytes operator by operator, on any device, with an optional hard budget."""

import sys
import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
)
from typing_extensions import Self

from lightning_memkit.memory.units import format_bytes
from lightning_memkit.utilities.tensors import is_wrapper

# Stack frames between autograd's engine and a meter: meters, and torch's wrappers of them.
_OWN, _TORCH = Path(__file__).parents[1], Path(torch.__file__).parent
_PASSED_OVER = (
    f"{_OWN}/memory/",
    f"{_OWN}/prediction/",
    f"{_TORCH}/_dynamo/",
    f"{_TORCH}/_compile.py",
    f"{_TORCH}/utils/_python_dispatch.py",
)

Category = Literal[
    "weights",
    "gradients",
    "optimizer_states",
    "compensation",
    "communication",
    "saved_activations",
    "temporaries",
    "inputs",
    "other",
]
Phase = Literal["outside", "forward", "backward", "optimizer"]


@dataclass(slots=True)
class Allocation:
    """The life of one storage: its size, its birth and death by the meter's clock, and its owner."""

    size_bytes: int
    born: int
    phase: Phase
    category: Category | None = None
    died: int | None = None
    origin: str = ""
    stream: int = 0  # the stream for which it was allocated; 0 is the default one
    maker: Any = None  # the operator that returned it; None for storages named by `track`

    def alive_at(self, tick: int) -> bool:
        """Whether the storage is alive right after a tick."""
        return self.born <= tick and (self.died is None or self.died > tick)


class ByteMeter(TorchDispatchMode):
    """Counts the bytes of live storages while it is active; costs tens of microseconds an operator.

    The meter sees what the dispatcher returns, so the peak is reproducible to the byte. Storages that exist
    before it is entered are counted once `track` names them. Workspaces that a kernel allocates and frees
    inside one operator are invisible. New Python threads don't inherit the meter; autograd's do. Compiled
    functions run eagerly while it is active, and compiled again afterwards.

    Args:
        budget_bytes: live bytes above this raise `torch.OutOfMemoryError`, as an allocator would.
        fail_at: the index of the allocation (0 for the first) that raises `torch.OutOfMemoryError`.
        record: keep every allocation's life, for an anatomy of the peak.
    """

    def __init__(
        self, *, budget_bytes: int | None = None, fail_at: int | None = None, record: bool = False
    ) -> None:
        super().__init__()
        self.budget_bytes = budget_bytes
        self.fail_at = fail_at
        self.live_bytes = 0
        self.peak_bytes = 0
        self.peak_tick = 0
        self.peak_operator = ""
        self.peak_origin = ""
        self.allocations = 0
        self.phase: Phase = "outside"
        self.origin = ""  # the owner of the next allocations, in the records
        self.category: Category | None = None  # of the next allocations, if known
        self.stream = 0  # of the next allocations
        self.operators = 0
        self.clock = 0  # one tick for every birth and every death
        self.records: list[Allocation] = []
        self.sums: list[tuple[int, int]] = []  # ticks (begin, end) with summands and sum alive
        self._record = record
        self._maker: Any = None
        self._sum_is_open = False  # autograd has added gradients but not yet freed the summand
        self._sum_began = 0
        self._alive: dict[int, tuple[Any, Allocation]] = {}
        self._stances: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> Self:
        # Otherwise a compiled function that is called within a dispatch mode would run eagerly forever after.
        compiles = "torch._dynamo" in sys.modules
        stance = torch.compiler.set_stance("force_eager") if compiles else nullcontext()
        stance.__enter__()
        self._stances.append(stance)
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._settle_sum()
        self._stances.pop().__exit__(*exception)

    def track(self, tensors: Iterable[Tensor], category: Category | None = None) -> None:
        """Count storages that exist already; if they are counted, only set their category."""
        self._maker = None  # left over if an operator failed
        for tensor in tensors:
            for storage in storages_of(tensor):
                known = self._alive.get(storage._cdata)
                if known is not None:
                    known[1].category = category or known[1].category
                else:
                    self._add(storage, category)
        self._note_peak("before the step")

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Recount a storage whose size was changed without the dispatcher: the old allocation ends."""
        known = self._alive.get(storage._cdata)
        if known is not None and known[1].size_bytes == storage.nbytes():
            return
        category = self.category
        if known is not None:
            category = category or known[1].category
            self._release(storage._cdata, known[1])
        self._add(storage, category)
        self._note_peak("resize_")

    def reset_peak(self) -> None:
        """Start a new peak from the bytes that are alive now."""
        self.peak_bytes = self.live_bytes
        self.peak_tick = self.clock
        self.peak_operator = self.peak_origin = ""

    def forget(self) -> None:
        """Stop counting all storages; their later deaths are ignored."""
        self._alive.clear()
        self.live_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._count(func, args, kwargs or {})

    def _count(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator and count what it allocates. torch wraps each `__torch_dispatch__`: override this one."""
        if self._settle_sum():
            self._refuse_over_budget("aten.add.Tensor")
        out = self._call(func, args, kwargs)
        self.operators += 1
        before, self._sum_began, self._maker = self.live_bytes, self.clock, func
        with torch._C.DisableTorchFunction():  # a mode would see each look at a tensor
            self._count_results(func, out, args, kwargs)
        self._maker = None
        if _adds_up_gradients(func):
            self._sum_is_open = True
            return out
        if self.live_bytes > self.peak_bytes:
            self._note_peak(str(func))
        if before < self.live_bytes:
            self._refuse_over_budget(str(func))
        return out

    def _count_results(self, func: Any, out: Any, args: Any, kwargs: dict[str, Any]) -> None:
        for tensor in tensors_in(out):
            for storage in storages_of(tensor):
                known = self._alive.get(storage._cdata)
                if known is None:
                    if _is_among(storage, args, kwargs):
                        continue  # a view of, or an update to, an existing storage that is not tracked
                    index, self.allocations = self.allocations, self.allocations + 1
                    if index == self.fail_at:
                        raise torch.OutOfMemoryError(
                            f"Allocation {index} ({format_bytes(storage.nbytes())}, {func}) was made to fail."
                        )
                    self._add(storage, None)
                elif known[1].size_bytes != storage.nbytes():
                    self._release(storage._cdata, known[1])
                    self._add(storage, known[1].category)

    def _settle_sum(self) -> bool:
        """Record the peak after a sum of autograd's own, once its summand is freed; True if there was one."""
        was_open, self._sum_is_open = self._sum_is_open, False
        if was_open:
            if self._record:
                self.sums.append((self._sum_began, self.clock))
            self._note_peak("aten.add.Tensor")
        return was_open

    def _refuse_over_budget(self, operator: str) -> None:
        if self.budget_bytes is not None and self.live_bytes > self.budget_bytes:
            raise torch.OutOfMemoryError(
                f"{operator} brings the live bytes to {format_bytes(self.live_bytes)}, over the budget of "
                f"{format_bytes(self.budget_bytes)}."
            )

    def _pass_through(self, size_bytes: int, operator: str) -> None:
        """Count bytes that an operator allocated and freed inside."""
        self.clock += 1
        record = Allocation(size_bytes, self.clock, self.phase, self.category, origin=self.origin)
        self.live_bytes += size_bytes
        self._note_peak(operator)
        self.live_bytes -= size_bytes
        self.clock += 1
        record.died = self.clock
        if self._record:
            self.records.append(record)

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run the operator that is being counted."""
        return func(*args, **kwargs)

    def _add(self, storage: torch.UntypedStorage, category: Category | None) -> None:
        size = storage.nbytes()
        if size == 0:
            return
        self.clock += 1
        record = Allocation(size, self.clock, self.phase, category or self.category)
        record.origin, record.stream, record.maker = self.origin, self.stream, self._maker
        key = storage._cdata
        self._alive[key] = (weakref.ref(storage, lambda _: self._release(key, record)), record)
        self.live_bytes += size
        if self._record:
            self.records.append(record)

    def _release(self, key: int, record: Allocation) -> None:
        known = self._alive.get(key)
        if known is not None and known[1] is record:
            del self._alive[key]
            self.live_bytes -= record.size_bytes
            self.clock += 1
            record.died = self.clock

    def _note_peak(self, operator: str) -> None:
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
            self.peak_tick = self.clock
            self.peak_operator, self.peak_origin = operator, self.origin


def unmetered() -> AbstractContextManager[Any]:
    """Within the context, meters from outside see no operators; they still notice when tensors die."""
    return _disable_current_modes()


def tensors_in(out: Any) -> Sequence[Tensor]:
    """The tensors of a value that an operator takes or returns: itself, or in lists and tuples."""
    if isinstance(out, Tensor):
        return (out,)
    if not isinstance(out, (tuple, list)):
        return ()
    found: list[Tensor] = []
    for item in out:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, (tuple, list)):
            found += tensors_in(item)
    return found


def _adds_up_gradients(func: Any) -> bool:
    """Whether autograd is adding two gradients; without a meter it would add in place and free one."""
    if (
        func is not torch.ops.aten.add.Tensor
        or torch._C._current_graph_task_id() == -1
        or torch.is_grad_enabled()
    ):
        return False
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_PASSED_OVER):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


def _is_among(storage: torch.UntypedStorage, args: Any, kwargs: dict[str, Any]) -> bool:
    inputs = tensors_in([*args, *kwargs.values()])
    return any(storage._cdata == own._cdata for tensor in inputs for own in storages_of(tensor))


def storages_of(tensor: Tensor) -> Sequence[torch.UntypedStorage]:
    """The storages behind a tensor; for a wrapper subclass (DTensor) those of its inner tensors."""
    if is_wrapper(tensor):
        names, _ = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
        parts = (getattr(tensor, name) for name in names)  # a DTensor also lists its mesh
        return [storage for part in parts if isinstance(part, Tensor) for storage in storages_of(part)]
    return (tensor.untyped_storage(),) if tensor.layout is torch.strided else ()
