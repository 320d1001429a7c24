"""Results of fake operators, handed on from prediction to prediction: torch's cache of them ends with each fork."""

import io
import pickle
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode, _DispatchCacheKey

from lightning_memkit.prediction.contained import contained

T = TypeVar("T")
Found = dict[Any, Any]  # as in torch's cache: what a fake operator returns, by operator and operands

_MOST = 20_000  # entries of one kind of simulation, some kilobytes each; beyond these it starts anew
_kept: dict[Hashable, Found] = {}


@contextmanager
def results_of(simulation: Hashable) -> Iterator[None]:
    """Within it, torch caches fake results for this kind of simulation alone; its own cache is left as it was.

    What an operator returns depends on the choices of kernels that a simulation patches.
    """
    before = FakeTensorMode.cache
    FakeTensorMode.cache = _kept.setdefault(simulation, {})
    try:
        yield
    finally:
        FakeTensorMode.cache = before


def contained_simulation(work: Callable[[], T], *, timeout_s: float = 600) -> T:
    """`contained`; what fake operators returned in `work` is known in later forks, whose time is mostly theirs."""

    def noted() -> tuple[T, bytes]:
        known = {simulation: len(found) for simulation, found in _kept.items()}
        result = work()
        return result, _sent(
            {
                simulation: dict(islice(found.items(), known.get(simulation, 0), None))
                for simulation, found in _kept.items()
            }
        )

    result, sent = contained(noted, timeout_s=timeout_s)
    for simulation, found in _received(sent).items():
        kept = _kept.setdefault(simulation, {})
        if len(kept) + len(found) > _MOST:
            kept.clear()
        kept.update(found)
    return result


def _sent(found: dict[Hashable, Found]) -> bytes:
    """What can be sent to another process; entries with objects of this one alone (subgraphs) are left out."""
    of_operators = {
        simulation: [(key.key, value) for key, value in entries.items() if isinstance(key.key[0], OpOverload)]
        for simulation, entries in found.items()
    }
    try:
        return _pickled(of_operators)
    except _NOT_PICKLED:
        return _pickled(
            {simulation: list(filter(_can_be_sent, each)) for simulation, each in of_operators.items()}
        )


_NOT_PICKLED = (pickle.PicklingError, TypeError, AttributeError, RuntimeError)


def _can_be_sent(entry: Any) -> bool:
    try:
        _pickled(entry)
    except _NOT_PICKLED:
        return False
    return True


def _received(sent: bytes) -> dict[Hashable, Found]:
    """Keys are made anew, since those of the fork know the addresses of its operators."""
    return {
        simulation: {_DispatchCacheKey(key): value for key, value in entries}
        for simulation, entries in _OperatorsFound(io.BytesIO(sent)).load().items()
    }


def _pickled(item: Any) -> bytes:
    buffer = io.BytesIO()
    _OperatorsByName(buffer, pickle.HIGHEST_PROTOCOL).dump(item)
    return buffer.getvalue()


class _OperatorsByName(pickle.Pickler):
    """Sends operators by their names."""

    def persistent_id(self, obj: Any) -> tuple[str, str, str] | None:
        if not isinstance(obj, OpOverload):
            return None
        namespace, _, name = obj._schema.name.partition("::")
        return namespace, name, obj._overloadname


class _OperatorsFound(pickle.Unpickler):
    """Finds operators by their names."""

    def persistent_load(self, pid: tuple[str, str, str]) -> Any:
        namespace, name, overload = pid
        return getattr(getattr(getattr(torch.ops, namespace), name), overload)
