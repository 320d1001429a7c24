"""Results of fake operators, handed on from prediction to prediction: what a fork has found ends with it."""

import pickle
import sys
from collections.abc import Callable, Hashable
from itertools import islice
from typing import TypeVar

from lightning_memkit.prediction.contained import contained
from lightning_memkit.prediction.handed_imports import import_all, imported_since
from lightning_memkit.prediction.known_results import Found

T = TypeVar("T")

_MOST = 20_000  # entries of one kind of simulation, some hundred bytes each; beyond these it starts anew
_kept: dict[Hashable, Found] = {}
_sent: list[tuple[bytes, list[str]]] = []  # by forks, and not read yet: the last one's may never be needed


def results_of(simulation: Hashable) -> Found:
    """What is known of this kind of simulation; it may be added to.

    What an operator returns depends on the choices of kernels that a simulation patches.
    """
    found = _kept.setdefault(simulation, {})
    _bound(found)
    return found


def contained_simulation(work: Callable[[], T], *, timeout_s: float = 600) -> T:
    """Return `work`'s result from a fork (see `contained`), and keep its fake results for the forks that follow.

    Finding what fake operators return takes much of a simulation's time; the next one of the same shapes saves it. So
    does what building a model imports: before the next fork, modules of transformers that this one has imported are
    imported here, too.

    Args:
        work: simulates steps, and returns something that can be pickled.
        timeout_s: seconds after which the fork is killed.

    Raises:
        PredictionError: as `contained` does.
    """

    def noted() -> tuple[T, bytes, list[str]]:
        known, modules = {simulation: len(found) for simulation, found in _kept.items()}, {*sys.modules}
        result = work()
        new = {
            simulation: [*islice(found.items(), known.get(simulation, 0), None)]
            for simulation, found in _kept.items()
        }
        return result, pickle.dumps(new), imported_since(modules)

    _read()
    result, found, names = contained(noted, timeout_s=timeout_s)
    _sent.append((found, names))
    return result


def _read() -> None:
    """Take over what forks have found and imported."""
    while _sent:
        found, names = _sent.pop()
        import_all(names)
        for simulation, entries in pickle.loads(found).items():
            kept = _kept.setdefault(simulation, {})
            kept.update(entries)
            _bound(kept)


def _bound(found: Found) -> None:
    if len(found) > _MOST:
        found.clear()
