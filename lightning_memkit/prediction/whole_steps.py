"""Predict training steps that are functions, without a loop around them; copies of batches."""

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from lightning_memkit.memory.meter import unmetered
from lightning_memkit.prediction.refusals import explained
from lightning_memkit.prediction.result import Prediction
from lightning_memkit.prediction.simulation import Simulation
from lightning_memkit.utilities.tensors import tensors_of

STEPS = 2  # the first creates the optimizer's states, the second has them from its start


def predicted_steps(step: Callable[[Any], Any], batch: Any, simulation: Simulation) -> Prediction:
    """Predict a training step that is a function; changes for good what it works on."""
    warnings.simplefilter("ignore")
    with simulation, explained():
        for given in BatchCopies(batch, STEPS):
            simulation.begin_step(tensors_of(given))
            step(given)
            simulation.end_step()
    return simulation.result()


class BatchCopies:
    """A number of real copies of a batch, which live as long as a loader's batches do."""

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
