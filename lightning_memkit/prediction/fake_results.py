"""Results of fake operators, handed on from prediction to prediction: torch's cache of them ends with each fork."""

import io
import pickle
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_memkit.prediction.contained import contained

T = TypeVar("T")
Found = dict[Any, Any]  # as in torch's cache: what a fake operator returns, by operator and operands

_MOST = 20_000  # entries of one kind of simulation, some kilobytes each; beyond these it starts anew
# Others may be defined in a fork alone. They are not cached by torch, only that they are not.
_NAMESPACES_OF_TORCH = ("aten", "prim", "prims")
_NOT_PICKLED = (pickle.PicklingError, TypeError, AttributeError, RuntimeError)
_kept: dict[Hashable, Found] = {}


@contextmanager
def results_of(simulation: Hashable) -> Iterator[None]:
    """Within it, torch caches fake results for this kind of simulation alone; its own cache is left as it was.

    What an operator returns depends on the choices of kernels that a simulation patches.
    """
    before, found = FakeTensorMode.cache, _kept.setdefault(simulation, {})
    FakeTensorMode.cache = found
    try:
        yield
    finally:
        FakeTensorMode.cache = before
        # Of other operators, torch would remove keys from its own cache, when the objects end whose `id` they have.
        for key in [key for key in found if not _is_torchs(key)]:
            del found[key]
        _bound(found)


def contained_simulation(work: Callable[[], T], *, timeout_s: float = 600) -> T:
    """Return `work`'s result from a fork (see `contained`), and keep its fake results for the forks that follow.

    Finding what fake operators return takes much of a simulation's time; the next one of the same shapes saves it.

    Args:
        work: simulates steps, and returns something that can be pickled.
        timeout_s: seconds after which the fork is killed.

    Raises:
        PredictionError: as `contained` does.
    """

    def noted() -> tuple[T, bytes]:
        known = {simulation: len(found) for simulation, found in _kept.items()}
        result = work()
        return result, _sent(
            {
                simulation: [*islice(found.items(), known.get(simulation, 0), None)]
                for simulation, found in _kept.items()
            }
        )

    result, sent = contained(noted, timeout_s=timeout_s)
    for simulation, found in _received(sent).items():
        kept = _kept.setdefault(simulation, {})
        kept.update(found)
        _bound(kept)
    return result


def _bound(found: Found) -> None:
    if len(found) > _MOST:
        found.clear()


def _is_torchs(key: Any) -> bool:
    operator = next(
        iter(getattr(key, "key", ())), None
    )  # nothing is kept where torch's keys are made otherwise
    return isinstance(operator, OpOverload) and operator.namespace in _NAMESPACES_OF_TORCH


def _sent(found: dict[Hashable, list[tuple[Any, Any]]]) -> bytes:
    """Entries for another process; those that can't be pickled are left out."""
    try:
        return _pickled(found)
    except _NOT_PICKLED:
        return _pickled({simulation: list(filter(_can_be_sent, each)) for simulation, each in found.items()})


def _can_be_sent(entry: Any) -> bool:
    try:
        _pickled(entry)
    except _NOT_PICKLED:
        return False
    return True


def _received(sent: bytes) -> dict[Hashable, Found]:
    """Entries from a fork; none where it has imported operators of torch that this process has not.

    Keys are made anew: those of the fork have the hashes of its own operators.
    """
    try:
        found = _OperatorsFound(io.BytesIO(sent)).load()
    except AttributeError:
        return {}
    return {
        simulation: {type(key)(key.key): value for key, value in entries}
        for simulation, entries in found.items()
    }


def _pickled(item: Any) -> bytes:
    buffer = io.BytesIO()
    _OperatorsByName(buffer, pickle.HIGHEST_PROTOCOL).dump(item)
    return buffer.getvalue()


class _OperatorsByName(pickle.Pickler):
    """Writes operators, which torch can't pickle, by their names."""

    def persistent_id(self, obj: Any) -> tuple[str, str, str] | None:
        if not isinstance(obj, OpOverload):
            return None
        _, _, name = obj._schema.name.partition("::")
        return obj.namespace, name, obj._overloadname


class _OperatorsFound(pickle.Unpickler):
    """Reads what `_OperatorsByName` has written."""

    def persistent_load(self, pid: tuple[str, str, str]) -> Any:
        namespace, name, overload = pid
        return getattr(getattr(getattr(torch.ops, namespace), name), overload)
