"""Ranks agree before each collective of code of which is known only that all ranks issue it, such as a user's step.

A rank that runs out of memory says so when its peers announce their next collective, or the end of the
micro-batch: none of them issues it, all abandon the micro-batch at the same place, and no collective is left
incomplete.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memkit.distributed.agreement import Agreement, PeerEndedError, StepOutcome
from lightning_memkit.distributed.catch_up import CannotCatchUpError
from lightning_memkit.memory.out_of_memory import is_out_of_memory

T = TypeVar("T")

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_NOT_OF_ALL_RANKS = ("send", "recv_", "recv_any_source_", "wait_tensor")


class Announcing(TorchDispatchMode):
    """Meets the peers before each collective; costs one host message each, and microseconds an operator.

    Point-to-point sends are not collectives, and collectives of other threads are not seen. Compiled
    functions run eagerly within it.

    Args:
        agreement: of all ranks.

    Attributes:
        failed: the peers that are known to have run out of memory.
        within: whether a collective has begun but not ended.
    """

    def __init__(self, agreement: Agreement) -> None:
        super().__init__()
        self.failed: tuple[int, ...] = ()
        self.within = False
        self._agreement = agreement

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it issues its collectives as separate operators
        if getattr(func, "namespace", "") not in _NAMESPACES or _name(func) in _NOT_OF_ALL_RANKS:
            return func(*args, **(kwargs or {}))
        return self._collective(func, args, kwargs or {})

    def _collective(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        self.failed = self.failed or self._agreement.meet().failed
        if self.failed:
            raise torch.OutOfMemoryError("Another rank ran out of memory.")
        self.within = True
        result = func(*args, **kwargs)
        self.within = False
        return result


def together(agreement: Agreement, run: Callable[[], T], *, passed_on: tuple[type[Exception], ...] = ()) -> T:
    """Run a micro-batch, or what follows a batch's, that runs on all ranks and issues the same collectives on each.

    Args:
        agreement: of all ranks.
        run: runs it; must not keep its tensors alive after a failure.
        passed_on: errors that are raised as they are, unless a rank has run out of memory.

    Raises:
        OutOfMemoryError: on all ranks, if one ran out of memory.
        CannotCatchUpError: memory ran out within a collective, in which peers may be waiting.
        PeerEndedError: another rank raised an error of its own.
    """
    announcing, failure, results, passed = Announcing(agreement), "", [], None
    try:
        # Otherwise a compiled function that is called within a dispatch mode would run eagerly forever after.
        with torch.compiler.set_stance("force_eager"), announcing:
            results.append(run())
    except PeerEndedError:
        raise
    except passed_on as error:
        passed = error.with_traceback(None)
    except Exception as error:
        if not is_out_of_memory(error):
            agreement.end()
            raise
        kind = type(error).__name__
        failure = str(error) if isinstance(error, torch.OutOfMemoryError) else f"{kind}: {error}"
    # Outside of `except`, because its traceback keeps the micro-batch's tensors alive.
    if announcing.within:
        raise CannotCatchUpError(f"Memory ran out within a collective, where peers may wait. {failure}")
    failed = announcing.failed
    if not failed:
        failed = agreement.meet(StepOutcome.OUT_OF_MEMORY if failure else StepOutcome.DONE).failed
    if failed:
        own = failure if agreement.rank in failed else ""
        others = ", ".join(str(rank) for rank in failed)
        raise torch.OutOfMemoryError(
            own or f"Rank {others} ran out of memory; all ranks repeat the micro-batch."
        )
    if passed is not None:
        raise passed
    return results[0]


def _name(func: Any) -> str:
    return func._schema.name.rpartition("::")[2]
