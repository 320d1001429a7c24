"""Train the effective batch within a memory budget, with an exact result."""

import copy
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_memkit.memory.limits import hard_cap
from lightning_memkit.memory.measure import budget_bytes, check_budget
from lightning_memkit.memory.sizing import Sizing
from lightning_memkit.micro_batching import WeighBy, Weigher
from lightning_memkit.micro_batching.engine import Engine, Record
from lightning_memkit.micro_batching.evaluation.engine import Observer
from lightning_memkit.micro_batching.history import PartsChange
from lightning_memkit.micro_batching.options import (
    BudgetOptions,
    Enforce,
    Within,
    check_options,
    check_within,
)
from lightning_memkit.micro_batching.parts.cut import Splitter
from lightning_memkit.micro_batching.run import Step
from lightning_memkit.plugins.memory_budget._evaluation import keep_budget_in_evaluation
from lightning_memkit.plugins.memory_budget._forecast import foreseen
from lightning_memkit.plugins.pickling import LeavesRunBehind, nothing
from lightning_memkit.plugins.seams import strategy, training_loop
from lightning_memkit.plugins.seams._checks import check_accumulation, warn_of_inexactness
from lightning_memkit.plugins.seams.lightning_run import LightningRun
from lightning_memkit.utilities.patching import Undo


class MemoryBudget(LeavesRunBehind, Callback):
    """Trains the loader's batch in micro-batches that fit the budget; the result is the same up to rounding.

    The DataLoader yields the effective batch (per rank). It is split inside the optimizer step, so shuffling,
    `global_step`, schedulers and logging don't depend on the micro-batch. Before step 1 a probe checks that
    the loss may be split (and again at two later batches), and the peak of the worst batch is measured;
    neither leaves a trace. After an OOM the state before the step is restored and the batch is retried in
    smaller micro-batches on all ranks.

    Price: one more forward and backward for each micro-batch size tried (at most 8), and the lower speed of
    smaller kernels. Not exact are batch statistics (a warning names BatchNorm layers), random draws (dropout
    draws for each micro-batch), and in bf16 the rounding of each micro-batch.

    Args:
        budget: the most bytes the device may use: `"22GiB"`, a fraction of its memory in (0, 1], a count of
            bytes, or `"auto"` (what is free when training starts plus what this process already holds on the
            GPU). On CPU the bytes of tensors are counted.
        micro_batch_size: the most samples in a micro-batch, or `"auto"`: the fastest size that fits, found by
            timing the first training steps. Where a loss can't be split, the most rows in a chunk of a module.
        effective_batch_size: samples in an optimizer step, if more than in a loader batch: loader batches are
            accumulated with exact weights. Must be a multiple of the loader's batch size.
        weigh_by: what the loss is a mean over: `"samples"`, `"labels"`, `"causal_labels"` (see
            `micro_batches`), `"sum"`, a callable from a micro-batch to a count, or `"auto"`: the one that the
            probe finds right.
        split: a function from (batch, sizes) to micro-batches, for batches that can't be split by rows.
        headroom: the fraction of the budget that the verified peak leaves free.
        recover: retry a step that runs out of memory with smaller micro-batches.
        enforce: `"verified"`: count bytes before step 1 only. `"always"`: on CPU also count them in every
            step, including evaluation, and treat exceeding the budget as an OOM; costs tens of microseconds
            an operator. CUDA's allocator enforces the budget in any case.
        within: what is split. `"step"`: the batch, into micro-batches. `"modules"`: the modules whose rows are
            independent run in chunks of rows and again in the backward, and the step runs once, on the whole batch:
            any loss is exact, for one more forward of these modules; `micro_batch_size` is then that of a chunk.
            `"auto"`: batches run whole where they fit, are split where that is proven, and else modules run in
            chunks. With `"auto"` and `"modules"`, where even one row does not fit, modules that take tokens one by
            one run in chunks of tokens.

    Raises:
        ValueError: an argument is outside its range, or the effective batch is no multiple of the loader
            batch.
        BudgetError: before the first step, if neither a micro-batch of 1 nor modules in small chunks fit; before a
            later step, if the probe finds only then that the loss can't be split, and the batch does not fit whole
            or with modules in chunks. With `within="step"`, also if the loss can't be split and the batch does not
            fit.
    """

    splits_batches = True
    of_run = {"_engine": nothing, "_undo": list}

    def __init__(
        self,
        budget: str | int | float = "auto",
        micro_batch_size: int | Literal["auto"] = "auto",
        effective_batch_size: int | None = None,
        weigh_by: WeighBy | Weigher = "auto",
        split: Splitter | None = None,
        headroom: float = 0.05,
        recover: bool = True,
        enforce: Enforce = "verified",
        within: Within = "auto",
    ) -> None:
        check_budget(budget)
        check_options(micro_batch_size, effective_batch_size, weigh_by, headroom, enforce)
        check_within(within, weigh_by, effective_batch_size, split)
        self.budget = budget
        self.micro_batch_size: int | Literal["auto"] = micro_batch_size
        self.effective_batch_size = effective_batch_size
        self.weigh_by: WeighBy | Weigher = weigh_by
        self.split = split
        self.headroom = headroom
        self.recover = recover
        self.enforce: Enforce = enforce
        self.within: Within = within
        self.budget_bytes = 0
        self._record = Record()
        self._resumed: dict[str, Any] = {}
        self._copied: dict[str, Any] = {}  # the state_dict of the callback that this is a copy of
        self._peaks: dict[int, int] = {}  # that callback's predicted peaks
        self._engine: Engine | None = None
        self._undo: list[Undo] = []

    def __repr__(self) -> str:
        return (
            f"MemoryBudget(budget={self.budget!r}, micro_batch_size={self.micro_batch_size!r}, "
            f"effective_batch_size={self.effective_batch_size!r}, weigh_by={self.weigh_by!r}, "
            f"split={self.split!r}, headroom={self.headroom!r}, recover={self.recover!r}, "
            f"enforce={self.enforce!r}, within={self.within!r})"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "_record": copy.deepcopy(self._record),
            "_copied": self.state_dict(),
            "_peaks": self.predicted_peaks,
        }

    @property
    def averages_after_backward(self) -> bool:
        """Whether this callback averages DDP's gradients, after ranks agree that none ran out of memory."""
        return self.recover

    @property
    def sizing(self) -> Sizing | None:
        """The size that was verified before step 1."""
        return self._record.sizing

    @property
    def peak_bytes(self) -> int:
        """The verified peak; with `enforce="always"`, the largest peak of any step."""
        return self._record.peak_bytes

    @property
    def retries(self) -> int:
        """How many steps ran out of memory and were retried."""
        return self._record.retries

    @property
    def history(self) -> list[PartsChange]:
        """The micro-batch sizes used, each with the step from which it applied."""
        return self._record.history

    @property
    def is_tuning(self) -> bool:
        """Whether sizes are still being timed on training steps."""
        tuning = None if self._engine is None else self._engine.choice.tuning
        return tuning is not None and tuning.fastest.settled is None

    @property
    def predicted_peaks(self) -> dict[int, int]:
        """Predicted peak in bytes by micro-batch size; empty if sizes were measured without a prediction."""
        foreseen = None if self._engine is None else self._engine.choice.known.foreseen
        return dict(self._peaks) if foreseen is None else dict(foreseen.peaks)

    def usable_bytes_on(self, device: torch.device) -> int:
        """The budget without its headroom."""
        return int(budget_bytes(self.budget, device) * (1 - self.headroom))

    # Lightning's hooks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse runs that can't work, and install the drivers of Lightning's loops."""
        self._give_back()
        self.budget_bytes = budget_bytes(self.budget, trainer.strategy.root_device)
        options = BudgetOptions(
            budget_bytes=self.budget_bytes,
            budget=self.budget,
            headroom=self.headroom,
            split=self.split,
            micro_batch_size=self.micro_batch_size,
            effective_batch_size=self.effective_batch_size,
            recover=self.recover,
            weigh_by=self.weigh_by,
            enforce=self.enforce,
            within=self.within,
        )
        self._undo = [
            hard_cap(trainer.strategy.root_device, self.budget_bytes),
            keep_budget_in_evaluation(trainer, options, self._observer(trainer)),
        ]
        if stage != "fit":
            return
        if not pl_module.automatic_optimization:
            warnings.warn(
                f"{type(pl_module).__name__} optimizes manually: MemoryBudget stands aside. Split in training_step "
                "with lightning_memkit.micro_batches(batch, size), which yields (part, weight).",
                stacklevel=2,
            )
            return
        check_accumulation(trainer, self.effective_batch_size)
        warn_of_inexactness(trainer, pl_module)
        transfer, undo_transfer = strategy.keep_batches_on_host(trainer)
        run = LightningRun(trainer, transfer)
        self._record.history = []
        self._engine = Engine(
            run,
            options,
            record=self._record,
            resumed=self._resumed,
            foresee=lambda step, sizes: foreseen(trainer, options, step.batch, sizes),
            retried=partial(self._log_retries, trainer),
        )
        self._undo += [training_loop.install(trainer, run, self), undo_transfer, self._engine.close]

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Undo here, too: Lightning calls no teardown after an error."""
        self._give_back()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore Lightning's loops."""
        self._give_back()

    def _give_back(self) -> None:
        while self._undo:
            self._undo.pop()()

    def state_dict(self) -> dict[str, Any]:
        """The sizes in use, which a resumed run uses again; while tuning, those that it goes on timing."""
        if self._engine is None or not self._engine.prepared:
            return dict(self._resumed or self._copied)
        return self._engine.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the sizes of the resumed run instead of measuring anew."""
        self._resumed.clear()
        self._resumed.update(state_dict)
        self._record.retries = int(state_dict.get("retries", 0))

    # The driver of Lightning's training loop

    def prepare(self, step: Step) -> None:
        """Check that the loss may be split, and choose a size: before step 1 and for new kinds of batches."""
        self._of_run.prepare(step)

    def around(self, step: Step) -> AbstractContextManager[None]:
        """Count every byte of the step with `enforce="always"`."""
        return self._of_run.around(step)

    def run(self, step: Step) -> tuple[Tensor | None, dict[str, Any]]:
        """Run the step's batch in micro-batches."""
        return self._of_run.run(step)

    def drive(self, step: Step, optimize: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Take the optimizer step; retry it with smaller micro-batches if it runs out of memory."""
        return self._of_run.drive(step, optimize)

    @property
    def _of_run(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("MemoryBudget is asked for a step before its setup.")
        return self._engine

    def _observer(self, trainer: Trainer) -> Observer:
        """Add evaluation's retries to training's, and its peaks if all bytes are counted."""

        def measured(peak_bytes: int) -> None:
            if self.enforce == "always":
                self._record.peak_bytes = max(self.peak_bytes, peak_bytes)

        def retried() -> None:
            self._record.retries += 1
            self._log_retries(trainer)

        return Observer(retried=retried, measured=measured)

    def _log_retries(self, trainer: Trainer) -> None:
        for logger in trainer.loggers:
            logger.log_metrics({"memory_budget/retries": float(self.retries)}, step=trainer.global_step)
