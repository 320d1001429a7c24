"""Make every allocation fail that exceeds a budget of live bytes."""

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_memkit.memory.meter import ByteMeter
from lightning_memkit.memory.units import format_bytes, parse_bytes
from lightning_memkit.testing.faults import Fault, Gate


class ByteBudget(ByteMeter):
    """Fails each operator that brings the live bytes over a budget; see `byte_budget`."""

    def __init__(self, budget_bytes: int, *, ranks: Collection[int] | None, armed: bool) -> None:
        super().__init__()
        self.most_bytes = budget_bytes
        self.fault: Fault | None = None
        self._gate = Gate(armed, ranks, None)

    def arm(self) -> None:
        """Start failing."""
        self._gate.armed = True

    def disarm(self) -> None:
        """Count bytes, but let all allocations succeed until `arm`."""
        self._gate.armed = False

    def _count(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        before = self.allocations
        out = super()._count(func, args, kwargs)
        over = self.allocations > before and self.live_bytes > self.most_bytes
        if over and self._gate.is_open() and self._gate.on_this_rank():
            self.fault = self.fault or Fault(point=before, operator=str(func))
            raise torch.OutOfMemoryError(
                f"{func} brings the live bytes to {format_bytes(self.live_bytes)}, over the budget of "
                f"{format_bytes(self.most_bytes)}."
            )
        return out


def byte_budget(
    budget: int | str,
    *,
    resident: Iterable[Tensor] = (),
    ranks: Collection[int] | None = None,
    armed: bool = True,
) -> ByteBudget:
    """Within it, each allocation that brings live bytes over the budget raises `torch.OutOfMemoryError`.

    Bytes are those of tensors, counted operator by operator on any device; costs tens of microseconds an
    operator.

    Args:
        budget: `"1MiB"` or a count of bytes.
        resident: existing tensors that count: weights, states, the batch.
        ranks: the ranks on which allocations fail; the others only count. None for all.
        armed: whether to start at once; otherwise `arm` starts. Bytes are counted in any case.

    Raises:
        ValueError: the budget can't be parsed.
    """
    limited = ByteBudget(parse_bytes(budget), ranks=ranks, armed=armed)
    limited.track(resident)
    return limited
