"""Trials of evaluation steps that leave no trace: what a part needs, and whether it communicates."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_debug
from torch import Tensor

from lightning_memkit.distributed.collectives import collectives_issued
from lightning_memkit.memory.measure import PeakMeter, peak_meter
from lightning_memkit.memory.meter import unmetered
from lightning_memkit.memory.out_of_memory import is_out_of_memory
from lightning_memkit.micro_batching import (
    SplitError,
    batch_size,
    split_batch,
)
from lightning_memkit.plugins import _evaluation_state as state
from lightning_memkit.plugins._partition import Splitter
from lightning_memkit.plugins._rank_alone import Ranks
from lightning_memkit.plugins._seam_evaluation import EvaluationStep, logging_held, nothing_logged
from lightning_memkit.plugins._trials import states_on
from lightning_memkit.utilities.tensors import tensors_of

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The peak of one part, and the outputs of the others that are alive when it runs last."""

    part_bytes: int
    other_outputs_bytes: int


class EvaluationTrials:
    """Runs an evaluation step's batch in ways that leave no trace in module, RNG and logs.

    Args:
        trainer: the trainer, within one of its evaluation loops.
        split: the user's own splitter.
    """

    def __init__(self, trainer: Trainer, split: Splitter | None) -> None:
        self.changing: frozenset[tuple[str, str]] | None = (
            None  # the tensors that steps change; None: not known
        )
        self.ranks = Ranks()
        self._trainer = trainer
        self._split = split

    def part(self, step: EvaluationStep, run: Callable[[], T]) -> T:
        """Run what holds one forward; where ranks meet in it, all run one, and one's failure is all ranks'."""
        return self.ranks.part(
            run, kind=f"{step.hook} {step.dataloader_idx}", smallest=lambda: self._smallest(step)
        )

    def _smallest(self, step: EvaluationStep) -> None:
        """A forward of one row, for nothing but its collectives."""
        batch = self.rows_of(step.batch, 1)
        with logging_held(self._trainer):
            step.forward(step.transfer(batch))

    def forward(self, step: EvaluationStep, batch: Any) -> Any:
        """What the step returns for a batch."""
        return self.part(step, lambda: step.forward(step.transfer(batch)))

    def rows_of(self, batch: Any, size: int) -> Any:
        """The first rows of a batch, or all of one that can't be split."""
        try:
            total = batch_size(batch)
        except SplitError:
            return batch
        if size >= total:
            return batch
        return split_batch(batch, [size, total - size], split=self._split)[0]

    def communicates(self, step: EvaluationStep) -> bool:
        """Whether the user's step issues collectives, by a forward of one row."""
        before = collectives_issued()
        try:
            with self.no_trace():
                self._smallest(step)
        except Exception as error:  # it may count on hooks that run later, or on more rows
            rank_zero_debug(f"MemoryBudget can't try a row in {step.hook}: {error!r}")
        after = collectives_issued()
        return after is None or after != before

    def repeat(self, step: EvaluationStep, batch: Any) -> None:
        """A forward that counts for nothing, for peers whose batches have more parts."""
        with self.no_trace():
            self.forward(step, batch)

    @contextmanager
    def no_trace(self) -> Iterator[None]:
        """Within it steps change and log nothing that lasts."""
        rollback = state.EvaluationRollback(self._trainer.lightning_module)
        try:
            with unmetered(), nothing_logged(self._trainer):
                yield
        finally:
            self.changing = (self.changing or frozenset()) | rollback.changed()
            rollback.restore()

    def meter(self, step: EvaluationStep, limit: int | None) -> PeakMeter:
        """A meter that knows what is on the device besides the step's own tensors."""
        device, module = self._trainer.strategy.root_device, self._trainer.lightning_module
        held = [*module.parameters(), *module.buffers()]
        held += [p.grad for p in module.parameters() if p.grad is not None]
        held += state.tensors_kept(module)
        for optimizer in self._trainer.optimizers:
            held += states_on(device, optimizer)
        given = tensors_of([step.batch, step.given])
        held += [tensor for tensor in given if tensor.device.type == device.type]
        return peak_meter(device, held, limit)

    def peak_of(self, step: EvaluationStep, size: int | None, limit: int | None) -> Peak | None:
        """What the first `size` samples need (None: the batch as it is); None where it runs out of memory."""
        if self.ranks.meets and self.ranks.reason:
            limit = None  # a rank that stops within a forward would leave the others waiting
        batch = step.batch if size is None else self.rows_of(step.batch, size)
        failed, peak, others = False, 0, 0
        with self.no_trace():
            meter = self.meter(step, limit)

            def run() -> Any:
                with meter:
                    return step.forward(step.transfer(batch))

            try:
                output = self.part(step, run)
                rest = max(0, batch_size(step.batch) - size) if size else 0
                peak, others = meter.peak_bytes, bytes_of(output) * rest // size if size else 0
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                failed = True
        most = self.ranks.largest_of([float(failed), peak, others])
        return None if most[0] else Peak(part_bytes=int(most[1]), other_outputs_bytes=int(most[2]))


def bytes_of(output: Any) -> int:
    """The bytes that an output keeps alive: those of whole storages, which views share."""
    storages: dict[int, int] = {}
    for tensor in tensors_of(output):
        storages.update(_storage(tensor))
    return sum(storages.values())


def _storage(tensor: Tensor) -> dict[int, int]:
    if tensor.layout is not torch.strided:
        return {id(tensor): tensor.numel() * tensor.element_size()}
    storage = tensor.untyped_storage()
    return {storage.data_ptr(): storage.nbytes()}
