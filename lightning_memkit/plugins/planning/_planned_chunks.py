"""Predictions with modules in chunks of tokens, as `MemoryBudget` finds them where no row fits."""

from contextlib import suppress
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_memkit.activations.chunks.finding import find_chunkable
from lightning_memkit.activations.chunks.forwards import ChunkedForwards, ChunkSizes
from lightning_memkit.activations.chunks.units import unit_numbers
from lightning_memkit.micro_batching.parts.module_chunks import first_tokens
from lightning_memkit.planning.problem import UnavailableError


class TokenChunks(Callback):
    """Runs the modules that take tokens one by one in chunks; changes the module for good.

    Args:
        tokens: the most in a chunk.
    """

    def __init__(self, tokens: int) -> None:
        self._sizes = ChunkSizes(tokens=tokens)
        self._found = False

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Find them, before the first step; what they log belongs to no step."""
        if self._found:
            return
        self._found = True

        def step() -> None:
            with suppress(Exception):  # the modules that ran before are known
                trainer.strategy.training_step(first_tokens(batch), batch_idx)

        found = find_chunkable(pl_module, step, "tokens")
        if not found:
            raise UnavailableError("tokens", "no module takes tokens one by one")
        units = unit_numbers(pl_module)
        for one in found:
            forwards = ChunkedForwards(
                self._sizes, refuses=False, only_with_gradient=True, unit=units.get(one.module)
            )
            forwards.patch(one.module)
