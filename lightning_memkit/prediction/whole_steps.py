"""Training steps that are functions, predicted without a loop around them, and the batches they are given."""

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from lightning_memkit.memory.meter import unmetered
from lightning_memkit.prediction.refusals import explained
from lightning_memkit.prediction.result import Prediction
from lightning_memkit.prediction.simulation import Simulation
from lightning_memkit.utilities.tensors import tensors_of

STEPS = 2  # the first makes the optimizer's states, the second has them from its beginning


def predicted_steps(step: Callable[[Any], Any], batch: Any, simulation: Simulation) -> Prediction:
    """A training step that is a function; changes what it works on for good."""
    warnings.simplefilter("ignore")
    with simulation, explained():
        for given in BatchCopies(batch, STEPS):
            simulation.begin_step(tensors_of(given))
            step(given)
            simulation.end_step()
    return simulation.result()


class BatchCopies:
    """As many copies of a batch as are asked for: real ones, whose life is that of a loader's batches."""

    def __init__(self, batch: Any, number: int) -> None:
        self._batch, self._number = batch, number

    def __len__(self) -> int:
        return self._number

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._number):
            with unmetered():
                batch = copy.deepcopy(self._batch)
            yield batch
            del batch
