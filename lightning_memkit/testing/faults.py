"""Make an allocation fail deliberately: operators' n-th new storage, or an allocator's n-th call."""

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memkit.memory.meter import ByteMeter


@dataclass(frozen=True, kw_only=True)
class Fault:
    """An allocation that was made to fail: its index, and the operator that requested it."""

    point: int
    operator: str


class FailingAllocator(Protocol):
    """A device whose allocator counts its calls and can fail on request; the type of `on=`."""

    @property
    def allocations(self) -> int:
        """Calls of the allocator so far, including failed ones."""
        ...

    @property
    def live_bytes(self) -> int:
        """Bytes of the device's memory in use."""
        ...

    @property
    def budget_bytes(self) -> int | None:
        """Live bytes that no allocation may exceed; None if there is no limit."""
        ...

    def set_limits(
        self, budget_bytes: int | None = None, fail_at: int | None = None, *, repeat: bool = False
    ) -> None:
        """Raise `torch.OutOfMemoryError` over a budget, and at one index of `allocations` or from it on."""
        ...

    def synchronize(self) -> None:
        """Wait until all work on the device has released its memory."""
        ...


class Faults(Protocol):
    """A context manager that counts allocations while it is armed, and may make some of them fail."""

    @property
    def allocations(self) -> int:
        """Allocations counted so far, including failed ones."""
        ...

    @property
    def live_bytes(self) -> int:
        """Bytes that were allocated inside and are alive."""
        ...

    @property
    def fault(self) -> Fault | None:
        """The first allocation that was made to fail; None before."""
        ...

    def arm(self) -> None:
        """Start counting and failing."""
        ...

    def disarm(self) -> None:
        """Let allocations succeed without counting until `arm`."""
        ...

    def __enter__(self) -> "Faults": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> object: ...


def fail_at(
    n: int,
    *,
    on: FailingAllocator | None = None,
    repeat: bool = False,
    ranks: Collection[int] | None = None,
    when: Callable[[], bool] | None = None,
    armed: bool = True,
) -> Faults:
    """Within it, the n-th allocation raises `torch.OutOfMemoryError`, once, so that a retry succeeds.

    An allocation is every storage that an operator creates, on any device: the error is raised after the
    operator has run. Costs tens of microseconds an operator while armed. Workspaces that a kernel allocates
    and frees inside one operator are not seen, nor are threads started by Python code; autograd's are. With
    `on=` an allocation is every call of that device's allocator; costs some microseconds an operator.

    Args:
        n: the index of the allocation, 0 for the first.
        on: the device whose allocator is to fail.
        repeat: whether every later allocation fails, too, until `disarm`.
        ranks: the ranks on which it fails; the others only count. None for all.
        when: called at every allocation: those for which it returns False neither fail nor count. Not
            together with `on`.
        armed: whether to start at once; otherwise `arm` starts.

    Raises:
        ValueError: n is below zero, or `when` is given together with `on`.

    Example:
        >>> with fail_at(3) as faults:
        ...     recovering_step()
        >>> assert faults.fault is not None
    """
    if n < 0:
        raise ValueError(f"n={n} is below zero; 0 is the first allocation.")
    if on is None:
        return OperatorFaults(n, repeat=repeat, ranks=ranks, when=when, armed=armed)
    if when is not None:
        raise ValueError(
            "when= is asked operator by operator, which a device's allocator can't do; leave on= out, or call "
            "arm() and disarm() where the phase begins and ends."
        )
    return AllocatorFaults(on, n, repeat=repeat, ranks=ranks, armed=armed)


def count_allocations(*, on: FailingAllocator | None = None, armed: bool = True) -> Faults:
    """Counts the allocations that `fail_at` could make fail; none fails."""
    if on is None:
        return OperatorFaults(None, armed=armed)
    return AllocatorFaults(on, None, armed=armed)


class OperatorFaults(ByteMeter):
    """Fails the n-th storage that operators create; see `fail_at`."""

    def __init__(
        self,
        n: int | None,
        *,
        repeat: bool = False,
        ranks: Collection[int] | None = None,
        when: Callable[[], bool] | None = None,
        armed: bool = True,
    ) -> None:
        super().__init__(fail_at=n)
        self.fault: Fault | None = None
        self._repeat = repeat
        self._gate = Gate(armed, ranks, when)

    def arm(self) -> None:
        """Start counting and failing."""
        self._gate.armed = True

    def disarm(self) -> None:
        """Let allocations succeed without counting until `arm`."""
        self._gate.armed = False

    def _count(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if not self._gate.is_open():
            return func(*args, **kwargs)
        point, fails_here = self.fail_at, self._gate.on_this_rank()
        self.fail_at = point if fails_here else None
        try:
            return super()._count(func, args, kwargs)
        except torch.OutOfMemoryError:
            if fails_here and point is not None and self.allocations > point:
                self.fault = self.fault or Fault(point=point, operator=str(func))
                point = self.allocations if self._repeat else None
            raise
        finally:
            self.fail_at = point


class AllocatorFaults(TorchDispatchMode):
    """Fails the n-th call of a device's allocator; see `fail_at`. Don't reset the device's counts inside."""

    def __init__(
        self,
        device: FailingAllocator,
        n: int | None,
        *,
        repeat: bool = False,
        ranks: Collection[int] | None = None,
        armed: bool = True,
    ) -> None:
        super().__init__()
        self._device = device
        self._n = n
        self._repeat = repeat
        self._gate = Gate(armed, ranks, None)
        self._counted = 0
        self._armed_since: int | None = None
        self._live_before = 0
        self._operator = ""

    @property
    def allocations(self) -> int:
        """Allocations counted so far, including failed ones."""
        since = self._armed_since
        return self._counted + (0 if since is None else self._device.allocations - since)

    @property
    def live_bytes(self) -> int:
        """Bytes on the device beyond those at entry."""
        return self._device.live_bytes - self._live_before

    @property
    def fault(self) -> Fault | None:
        """The allocation that failed, if it has; its operator is known only if the error reached one."""
        if self._n is None or self.allocations <= self._n or not self._gate.on_this_rank():
            return None
        return Fault(point=self._n, operator=self._operator)

    def arm(self) -> None:
        """Start counting and failing."""
        if self._armed_since is not None:
            return
        self._armed_since = self._device.allocations
        fires = self._n is not None and self._gate.on_this_rank()
        if self._n is not None and fires and (self._repeat or self._counted <= self._n):
            point = self._armed_since + max(0, self._n - self._counted)
            self._device.set_limits(self._device.budget_bytes, point, repeat=self._repeat)

    def disarm(self) -> None:
        """Let allocations succeed without counting until `arm`."""
        self._counted, self._armed_since = self.allocations, None
        self._device.set_limits(self._device.budget_bytes)

    def __enter__(self) -> "AllocatorFaults":
        super().__enter__()
        self._live_before = self._device.live_bytes
        if self._gate.armed:
            self.arm()
        return self

    def __exit__(self, *error: Any) -> None:
        self.disarm()
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except torch.OutOfMemoryError:
            self._operator = self._operator or str(func)
            raise


class Gate:
    """Whether faults are active at the moment, and on this rank."""

    def __init__(self, armed: bool, ranks: Collection[int] | None, when: Callable[[], bool] | None) -> None:
        self.armed = armed
        self._ranks = ranks
        self._when = when

    def is_open(self) -> bool:
        """Whether faults are active at the moment."""
        return self.armed and (self._when is None or self._when())

    def on_this_rank(self) -> bool:
        """Whether faults apply to this rank."""
        return self._ranks is None or _rank() in self._ranks


def _rank() -> int:
    """This process's rank: that of the process group if there is one, else the launcher's."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))
