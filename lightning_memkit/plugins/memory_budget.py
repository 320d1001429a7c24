"""Keep the effective batch and its exact result within a memory budget."""

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_memkit.memory.limits import hard_cap
from lightning_memkit.memory.measure import budget_bytes, check_budget
from lightning_memkit.memory.meter import ByteMeter, unmetered
from lightning_memkit.memory.sizing import Sizing
from lightning_memkit.micro_batching import SplitError, WeighBy, Weigher, batch_size
from lightning_memkit.micro_batching.foreseen import ForeseenWronglyError
from lightning_memkit.optim.journal import BUNDLE_BYTES, BUNDLE_BYTES_CPU, journal_steps
from lightning_memkit.plugins import _seam
from lightning_memkit.plugins._checks import check_accumulation, warn_of_hooks, warn_of_inexactness
from lightning_memkit.plugins._choice import PartsChoice
from lightning_memkit.plugins._evaluation import Observer, keep_budget_in_evaluation
from lightning_memkit.plugins._history import PartsChange, noted
from lightning_memkit.plugins._options import BudgetOptions, Enforce, check_options
from lightning_memkit.plugins._partition import WHOLE, Cut, Partition, Splitter
from lightning_memkit.plugins._parts import PartsRunner
from lightning_memkit.plugins._pickling import LeavesRunBehind, nothing
from lightning_memkit.plugins._ranks import local_optimizer, ranks_of
from lightning_memkit.plugins._recovery import Recovery
from lightning_memkit.plugins._sizing import AccumulationWindow, set_gradient_parts
from lightning_memkit.plugins._trials import Trials
from lightning_memkit.plugins._value_looks import ValueLooks
from lightning_memkit.utilities.generators import Generators
from lightning_memkit.utilities.patching import Undo
from lightning_memkit.utilities.tensors import tensors_of

_COPIED = 0.01  # of the budget, for copies beside an optimizer's step that may be left half-done


class MemoryBudget(LeavesRunBehind, Callback):
    """Trains the loader's batch in parts that fit the budget, with the unsplit batch's result up to rounding.

    The DataLoader yields the effective batch (per rank). Each is split inside the optimizer step, so shuffling,
    `global_step`, schedulers and logging don't change with the parts. Before step 1 a probe checks that the loss
    may be split (two later batches are probed again), the peak of the worst batch is measured, and both leave no
    trace. After an OOM the state before the step is restored and the same batch runs in smaller parts, on all ranks.

    Price: one forward and backward more a part's size tried (at most 8), and the smaller kernels of smaller parts.
    What is not exact: batch statistics (BatchNorm is warned about), random draws (dropout draws part by part), and
    in bf16 the rounding of each part.

    Args:
        budget: the most bytes the device may use: `"22GiB"`, a fraction of its memory in (0, 1], a count of bytes,
            or `"auto"` (what is free when training starts, and what this process holds of a GPU already). On CPU the
            bytes of tensors are counted.
        micro_batch_size: the most samples in a part, or `"auto"`: the fastest of those that fit, found on the first
            training steps.
        effective_batch_size: samples an optimizer step covers, if more than a loader batch: loader batches are
            accumulated and weighed exactly. Must be a multiple of the loader's batch size.
        weigh_by: what the loss is a mean over: `"samples"`, `"labels"`, `"causal_labels"` (see `micro_batches`),
            `"sum"`, a callable from a part to a count, or `"auto"`: what the probe finds right.
        split: from (batch, sizes) to parts, for batches that are to be cut in another way than row by row.
        headroom: the fraction of the budget that the verified peak leaves free.
        recover: retry a step that runs out of memory with smaller parts.
        enforce: `"verified"`: count bytes before step 1 only. `"always"`: on CPU count them in every step too, also
            of evaluation, and treat a byte over the budget as an OOM; costs tens of microseconds an operator. CUDA's
            allocator enforces by itself.

    Raises:
        ValueError: an argument is outside its range, or the effective batch is not made of whole loader batches.
        BudgetError: before the first step: the budget can't hold a micro-batch of 1, or the loss can't be split;
            before a later one: the probe finds only then that the loss can't be split.
    """

    of_run = {"_runner": nothing, "_trials": nothing, "_recovery": nothing, "_choice": nothing, "_undo": list}

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
    ) -> None:
        check_budget(budget)
        check_options(micro_batch_size, effective_batch_size, weigh_by, headroom, enforce)
        self.budget = budget
        self.micro_batch_size: int | Literal["auto"] = micro_batch_size
        self.effective_batch_size = effective_batch_size
        self.weigh_by: WeighBy | Weigher = weigh_by
        self.split = split
        self.headroom = headroom
        self.recover = recover
        self.enforce: Enforce = enforce
        self.budget_bytes = 0
        self.sizing: Sizing | None = None
        self.peak_bytes = 0
        self.retries = 0
        self.history: list[PartsChange] = []
        self._resumed: dict[str, Any] = {}
        self._copied: dict[str, Any] = {}  # the state of the one that this is a copy of
        self._peaks: dict[int, int] = {}  # likewise
        self._prepared = False
        self._has_split = False
        self._window = AccumulationWindow(effective_batch_size)
        self._runner: PartsRunner | None = None
        self._trials: Trials | None = None
        self._recovery: Recovery | None = None
        self._choice: PartsChoice | None = None
        self._undo: list[Undo] = []

    def __repr__(self) -> str:
        return (
            f"MemoryBudget(budget={self.budget!r}, micro_batch_size={self.micro_batch_size!r}, "
            f"effective_batch_size={self.effective_batch_size!r}, weigh_by={self.weigh_by!r}, "
            f"split={self.split!r}, headroom={self.headroom!r}, recover={self.recover!r}, "
            f"enforce={self.enforce!r})"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "_copied": self.state_dict(),
            "_peaks": self.predicted_peaks,
            "_prepared": False,
            "_window": AccumulationWindow(self.effective_batch_size),
        }

    @property
    def averages_after_backward(self) -> bool:
        """Whether DDP's gradients are averaged here, once all ranks agree that none ran out of memory."""
        return self.recover

    @property
    def is_tuning(self) -> bool:
        """Whether sizes are still being timed, on training steps."""
        tuning = None if self._choice is None else self._choice.tuning
        return tuning is not None and tuning.fastest.settled is None

    @property
    def predicted_peaks(self) -> dict[int, int]:
        """Predicted bytes by micro-batch; empty where sizes were measured without a prediction."""
        foreseen = None if self._choice is None else self._choice.foreseen
        return dict(self._peaks) if foreseen is None else dict(foreseen.peaks)

    # Lightning's hooks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what can't work, and take the seams of Lightning's loops."""
        self._give_back()
        self.budget_bytes = budget_bytes(self.budget, trainer.strategy.root_device)
        options = BudgetOptions(
            budget_bytes=self.budget_bytes,
            budget=self.budget,
            headroom=self.headroom,
            split=self.split,
            micro_batch_size=self.micro_batch_size,
            recover=self.recover,
            weigh_by=self.weigh_by,
            enforce=self.enforce,
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
        self._window.open_early(trainer)
        transfer, undo_transfer = _seam.keep_batches_on_host(trainer)
        self._trials = Trials(trainer, transfer, options.usable_bytes)
        self._runner = PartsRunner(
            trainer,
            transfer,
            Partition(micro_batch_size=WHOLE, weigh=batch_size, split=self.split),
            exact_window=self.effective_batch_size is not None,
        )
        self._choice = PartsChoice(options, self._runner, self._trials, self._window, self._resumed)
        self._recovery = Recovery(
            self._runner, resized=self._resized, dry=self._choice.dry, reconsider=self._reconsidered
        )
        self._recovery.retries = self.recover
        self.history = []
        self._undo += [_seam.install(trainer, self), undo_transfer, self._window.close]
        self._prepared = self._has_split = False

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Lightning calls no teardown after an error."""
        self._give_back()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the seams back."""
        self._give_back()

    def _give_back(self) -> None:
        while self._undo:
            self._undo.pop()()

    def state_dict(self) -> dict[str, Any]:
        """The sizes in use, which a resumed run repeats; while tuning is under way, those it goes on to time."""
        if self._choice is None or not self._prepared:
            return dict(self._resumed or self._copied)
        return {
            **self._choice.state_dict(),
            "retries": self.retries,
            **(self._recovery.state_dict() if self._recovery is not None else {}),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the sizes of the run that is resumed, instead of measuring anew."""
        self._resumed.clear()
        self._resumed.update(state_dict)
        self.retries = int(state_dict.get("retries", 0))

    # The seam's driver

    def prepare(self, step: _seam.Step) -> None:
        """Before the first step: probe, measure, choose; then probe where a batch is the first to differ."""
        if self._runner is None or self._trials is None or self._choice is None:
            return
        generators = Generators()  # a data set that is scanned for its largest sample may draw
        try:
            with unmetered():  # whoever meters the step is to see the step
                if self._prepared:
                    probes = self._choice.weighing.probes
                    self._choice.before_later(step)
                    if self._choice.weighing.probes != probes:
                        gc.collect()  # as after the first
                else:
                    self._prepare_first(step, self._runner, self._trials, self._choice)
            if self._choice.sizing is not None:
                self._runner.partition.fewest = self._choice.sizing.fewest
        finally:
            generators.restore()

    def _prepare_first(
        self, step: _seam.Step, runner: PartsRunner, trials: Trials, choice: PartsChoice
    ) -> None:
        """Before the first step; where that fails, everything is as before, and it may be tried again."""
        taken = len(self._undo)
        try:
            if self._recovery is not None:
                self._recovery.load_state_dict(self._resumed)
            self._meet(step.trainer, runner, trials)
            self._journal(step)
            with trials.materialized(step):
                self.sizing = choice.before_first(step)
        except BaseException:
            while len(self._undo) > taken:
                self._undo.pop()()
            raise
        self.peak_bytes = self.sizing.peak_bytes
        if self._recovery is not None:
            self._recovery.changing = trials.changing
        self._prepared = True
        gc.collect()  # nodes of the trials' graphs that refer to each other hold tensors until then

    def _meet(self, trainer: Trainer, runner: PartsRunner, trials: Trials) -> None:
        """Let ranks take steps together, where that can be."""
        ranks = ranks_of(trainer, recover=self.recover)
        if ranks.reason and self.recover:
            rank_zero_warn(
                f"Steps that run out of memory are not retried on several ranks, since {ranks.reason}."
            )
        runner.ranks = trials.ranks = ranks
        runner.survey = self._survey
        runner.values.look = ValueLooks(trials) if trainer.world_size == 1 else None
        if trainer.world_size > 1:
            self._undo += [ranks.close, _seam.clip_by(trainer, ranks.clip)]

    def _survey(self, step: _seam.Step, cut: Cut) -> list[float]:
        """What the terms of a batch's loss count in all its parts, and on all ranks."""
        partition = None if self._runner is None else self._runner.partition
        if self._trials is None or partition is None or partition.rules is None:
            raise RuntimeError("MemoryBudget surveys a batch before its loss is known.")
        with unmetered():
            return self._trials.survey(step, cut, partition, partition.rules)

    def _journal(self, step: _seam.Step) -> None:
        """Let the optimizer's own step survive an OOM; where it can't, no step is retried."""
        if not self.recover or self._recovery is None:
            return
        try:
            on_cpu = step.trainer.strategy.root_device.type == "cpu"
            most = min(BUNDLE_BYTES_CPU if on_cpu else BUNDLE_BYTES, int(self.budget_bytes * _COPIED))
            journal = journal_steps(
                local_optimizer(step.optimizer),
                ready=self._recovery.optimizer_steps,
                bundle_bytes=max(1, most),
            )
        except (TypeError, ValueError) as error:
            warnings.warn(f"MemoryBudget can't retry steps that run out of memory: {error}", stacklevel=2)
            self._recovery.retries = False
        else:
            self._undo.append(journal.undo)

    @contextmanager
    def around(self, step: _seam.Step) -> Iterator[None]:
        """Count every byte of the step where the budget is enforced always."""
        if self.enforce != "always" or step.trainer.strategy.root_device.type == "cuda":
            yield
            return
        module = step.trainer.lightning_module
        meter = ByteMeter(budget_bytes=self.budget_bytes)
        meter.track([*module.parameters(), *module.buffers()])
        meter.track(tensors_of([dict(step.optimizer.state), step.batch]))
        meter.track(p.grad for p in module.parameters() if p.grad is not None)
        with meter:
            yield
        self.peak_bytes = max(self.peak_bytes, meter.peak_bytes)

    def run(self, step: _seam.Step) -> tuple[Tensor | None, dict[str, Any]]:
        """Run the step's batch in parts."""
        if self._runner is None:
            raise RuntimeError("MemoryBudget runs a step before its setup.")
        return self._runner.run(step)

    def drive(self, step: _seam.Step, optimize: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Take the optimizer step; again with smaller parts where it runs out of memory."""
        began_at = step.trainer.global_step
        if self._runner is None or self._choice is None:
            raise RuntimeError("MemoryBudget drives a step before its setup.")
        self._warn_where_split(step, self._runner.partition)
        with self._choice.timed(step):
            result = optimize() if self._recovery is None else self._recovery.drive(step, optimize)
            size, row_tokens = self._choice.size_in_use, self._runner.partition.row_tokens
        fastest = self._choice.faster_than_larger_ones
        if self._recovery is not None and fastest:
            self._recovery.forget_above(fastest)
        noted(self.history, PartsChange(began_at, size, row_tokens, step.batch_idx))
        return result

    def _warn_where_split(self, step: _seam.Step, partition: Partition) -> None:
        """Once, before the first batch that is split: which hooks run in every part."""
        if self._has_split or partition.whole or partition.held:
            return
        try:
            splits = batch_size(step.batch) > partition.micro_batch_size
        except SplitError:  # running it says so
            return
        if not splits:
            return
        self._has_split = True
        warn_of_hooks(step.trainer, step.trainer.lightning_module)

    def _reconsidered(self, step: _seam.Step, error: ForeseenWronglyError, *, last: bool) -> None:
        """A batch's loss was another one than foreseen: what follows from it, before the batch runs again."""
        generators = Generators()
        try:
            with unmetered():
                if self._choice is not None:
                    self._choice.reconsider(step, error, last=last)
        finally:
            generators.restore()

    def _resized(self, step: _seam.Step, *, retry: bool) -> None:
        """The precision hears of the new number of parts; the logger of a retry."""
        trainer = step.trainer
        if self._runner is not None:
            set_gradient_parts(trainer, -(-batch_size(step.batch) // self._runner.partition.micro_batch_size))
        if retry:
            self._count_retry(trainer)

    def _observer(self, trainer: Trainer) -> Observer:
        """Evaluation's retries count with training's, and so do its peaks where all bytes are counted."""

        def measured(peak_bytes: int) -> None:
            if self.enforce == "always":
                self.peak_bytes = max(self.peak_bytes, peak_bytes)

        return Observer(retried=partial(self._count_retry, trainer), measured=measured)

    def _count_retry(self, trainer: Trainer) -> None:
        self.retries += 1
        for logger in trainer.loggers:
            logger.log_metrics({"memory_budget/retries": float(self.retries)}, step=trainer.global_step)
