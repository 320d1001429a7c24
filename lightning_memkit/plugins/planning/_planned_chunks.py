"""Predictions with modules in chunks of rows or tokens, as `MemoryBudget` finds and runs them."""

from contextlib import suppress
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_memkit.activations.chunks.axes import AxisName
from lightning_memkit.activations.chunks.finding import ChunkableModule, find_chunkable
from lightning_memkit.activations.chunks.forwards import ChunkedForwards, ChunkSizes
from lightning_memkit.activations.chunks.units import unit_numbers
from lightning_memkit.micro_batching.parts.module_chunks import parts_asked
from lightning_memkit.planning.problem import ChunkLimits, UnavailableError
from lightning_memkit.prediction.asides import uncounted

_WHY_NONE: dict[AxisName, str] = {
    "rows": "no module treats rows independently",
    "tokens": "no module takes tokens one by one",
}


class PlannedChunks(Callback):
    """Runs the modules whose rows, or tokens, are independent in chunks; changes the module for good.

    Args:
        limits: of chunks.
    """

    def __init__(self, limits: ChunkLimits) -> None:
        self._limits, self._found = limits, False

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Find them, before the first step; what they log belongs to no step."""
        if self._found:
            return
        self._found = True
        sizes: dict[str, ChunkSizes] = {}
        for axis in _WHY_NONE:
            size: int | None = getattr(self._limits, axis)
            if size is None:
                continue
            with uncounted():
                names = [one.name for one in _found(trainer, batch, batch_idx, axis)]
            for name in names:
                setattr(sizes.setdefault(name, ChunkSizes()), axis, size)
        units = unit_numbers(pl_module)
        for name, chunk in sizes.items():
            module = pl_module.get_submodule(name)
            unit = units.get(module)
            ChunkedForwards(chunk, refuses=False, only_with_gradient=True, unit=unit).patch(module)


def _found(trainer: Trainer, batch: Any, batch_idx: int, axis: AxisName) -> list[ChunkableModule]:
    """The modules, from few rows and tokens."""
    for part in parts_asked(batch, axis):

        def step(part: Any = part) -> None:
            with suppress(Exception):  # the modules that ran before are known
                trainer.strategy.training_step(part, batch_idx)

        found = find_chunkable(trainer.lightning_module, step, axis)
        if found:
            return found
    raise UnavailableError(axis, _WHY_NONE[axis])
