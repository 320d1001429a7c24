"""Train a run's batches within a budget: prove, size, split, weigh, recover. Knows nothing of Lightning."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_memkit.memory.meter import ByteMeter, unmetered
from lightning_memkit.memory.sizing import Sizing
from lightning_memkit.micro_batching import batch_size
from lightning_memkit.micro_batching.changes.spare_copies import SpareCopies
from lightning_memkit.micro_batching.choice import PartsChoice
from lightning_memkit.micro_batching.history import WHOLE, PartsChange, noted
from lightning_memkit.micro_batching.journaling import Journaling
from lightning_memkit.micro_batching.options import BudgetOptions
from lightning_memkit.micro_batching.parts.batch_weights import Surveyed
from lightning_memkit.micro_batching.parts.cut import Cut
from lightning_memkit.micro_batching.parts.partition import Partition
from lightning_memkit.micro_batching.parts.runner import PartsRunner
from lightning_memkit.micro_batching.parts.value_looks import ValueLooks
from lightning_memkit.micro_batching.parts.whole_comparison import WholeComparison
from lightning_memkit.micro_batching.proof.lazy_modules import materialized
from lightning_memkit.micro_batching.proof.survey import Surveys
from lightning_memkit.micro_batching.proof.trials import Trials
from lightning_memkit.micro_batching.proof.whole_looks import WholeLooks
from lightning_memkit.micro_batching.ranks.agreement import ranks_of
from lightning_memkit.micro_batching.recovery import Recovery
from lightning_memkit.micro_batching.run import Run, Step
from lightning_memkit.micro_batching.shares.foreseen import ForeseenWronglyError
from lightning_memkit.micro_batching.sizes.sizing import Foreseen
from lightning_memkit.micro_batching.sizes.window import AccumulationWindow
from lightning_memkit.utilities.garbage import collect_all, new_garbage, put_aside
from lightning_memkit.utilities.generators import Generators
from lightning_memkit.utilities.patching import Undo
from lightning_memkit.utilities.tensors import tensors_of

_COPIED = 0.01  # of the budget: copies that an optimizer's step keeps so that it can be finished after an OOM

Foresee = Callable[[Step, Sequence[int]], Foreseen | None]


@dataclass(kw_only=True)
class Record:
    """The results of a run so far. It outlives the engine.

    Attributes:
        sizing: the size that was verified before step 1.
        peak_bytes: the verified peak; the largest of any step where all bytes are counted.
        retries: how many steps were retried after an OOM.
        history: from which step on micro-batches had which size.
    """

    sizing: Sizing | None = None
    peak_bytes: int = 0
    retries: int = 0
    history: list[PartsChange] = field(default_factory=list)


class Engine:
    """Takes the steps of a run within a budget, with the unsplit batch's result.

    For each batch a loop calls `prepare`; then, within `around`, it calls `drive` with its own optimizer step, whose
    closure calls `run` in place of forward, zero_grad and backward. After the last batch it calls `close`.

    Args:
        run: the loop.
        options: the budget, and the user's choices.
        record: filled with the run's results.
        resumed: the state of the run that is resumed; it may be filled until the first batch.
        foresee: predicts the peaks of sizes before the first step; None where a prediction is impossible or costs
            more than it saves.
        retried: called before a batch is retried after an OOM.
    """

    def __init__(
        self,
        run: Run,
        options: BudgetOptions,
        *,
        record: Record,
        resumed: Mapping[str, Any],
        foresee: Foresee = lambda step, sizes: None,
        retried: Callable[[], None] = lambda: None,
    ) -> None:
        self.loop, self.options, self.record = run, options, record
        self.prepared = False
        self.window = AccumulationWindow(options.effective_batch_size)
        self.window.open_early(run)
        self.trials = Trials(run, options.usable_bytes)
        self._surveys = Surveys(run, self.trials, has_windows=options.effective_batch_size is not None)
        self.runner = PartsRunner(
            run,
            Partition(micro_batch_size=WHOLE, split=options.split),
            self.trials.watch,
            exact_window=options.effective_batch_size is not None,
        )
        self.choice = PartsChoice(options, self.runner, self.trials, self.window, resumed, foresee)
        self.recovery = Recovery(
            self.runner, resized=self._resized, dry=self.choice.dry, reconsider=self._reconsidered
        )
        self.recovery.retries = options.recover
        self.recovery.spares = SpareCopies(int(options.budget_bytes * _COPIED))
        self._resumed, self._retried = resumed, retried
        self._has_split = False
        self._journaling = Journaling(self.recovery, int(options.budget_bytes * _COPIED))
        self._undo: list[Undo] = [self.window.close, self.runner.chunks.close]

    def close(self) -> None:
        """Undo all that was changed in the run."""
        while self._undo:
            self._undo.pop()()
        self._journaling.undo()
        self.recovery.close()

    def state_dict(self) -> dict[str, Any]:
        """The sizes in use, which a resumed run uses again; while tuning is under way, those it goes on to time."""
        return {
            **self.choice.state_dict(),
            "retries": self.record.retries,
            **self.recovery.failed_sizes.state_dict(),
            "failed_tokens": self.recovery.failed_tokens.state_dict(),
        }

    def prepare(self, step: Step) -> None:
        """Before the first step probe, measure and choose a size; later probe a batch that holds something new.

        Raises:
            BudgetError: nothing fits the budget, or the loss can't be split.
        """
        # A data set may draw random numbers while it is scanned for its largest sample.
        generators = Generators()
        try:
            with unmetered(), new_garbage():  # a meter around the step must see the step alone
                if self.prepared:
                    self._journaling.follow(step)
                    self.choice.before_later(step)
                else:
                    if self.loop.device.type != "cpu":
                        collect_all()  # what earlier work has left would count as the step's
                    put_aside()  # nodes of the trials' graphs are in cycles, which hold tensors
                    self._prepare_first(step)
            outlive = self.trials.adds_up or not self.loop.zeroes_gradients(step.optimizer)
            self.runner.gradients_outlive(outlive)
            if self.choice.sizing is not None:
                self.runner.partition.need_rows(self.choice.sizing.fewest)
        finally:
            generators.restore()

    def _prepare_first(self, step: Step) -> None:
        """Prepare the first step. If that fails, the run is as before, and it may be tried again."""
        taken = len(self._undo)
        try:
            self.recovery.failed_sizes.load_state_dict(self._resumed)
            self.recovery.failed_tokens.load_state_dict(self._resumed.get("failed_tokens", {}))
            self._meet()
            self._journaling.follow(step)
            with materialized(step, self.trials):
                self.record.sizing = self.choice.before_first(step)
        except BaseException:
            while len(self._undo) > taken:
                self._undo.pop()()
            self._journaling.undo()
            raise
        self.record.peak_bytes = self.record.sizing.peak_bytes
        self.recovery.changing = self.trials.changing
        self.prepared = True

    def _meet(self) -> None:
        """Connect the ranks, so that one that runs out of memory leaves no other waiting."""
        recover = self.options.recover
        ranks = ranks_of(self.loop, recover=recover)
        if ranks.reason and recover:
            self.loop.warn(
                f"Steps that run out of memory are not retried on several ranks, since {ranks.reason}."
            )
        self.trials.ranks = ranks
        self.runner.connect(ranks, self._survey)
        looks, is_alone = WholeLooks(self.loop, self.trials), self.loop.world_size == 1
        self.runner.whole = WholeComparison(
            looks if is_alone else None,
            of_ranks=None if is_alone or ranks.meets or ranks.reason else looks,
            exact_window=self.options.effective_batch_size is not None,
            stated=self.options.weigh_by != "auto" or self.options.split is not None,
        )
        self.runner.values.look = ValueLooks(self.trials) if self.loop.world_size == 1 else None
        if self.loop.world_size > 1:
            self._undo += [ranks.close, self.loop.clip_by(ranks.clip)]

    def _survey(self, step: Step, cut: Cut) -> Surveyed:
        """What the terms of a batch's loss count in all its micro-batches, and on all ranks."""
        partition, rules = self.runner.partition, self.runner.partition.combination.rules
        if rules is None:
            raise RuntimeError("The engine surveys a batch before its loss is known.")
        self.runner.phase = "in reading what the loss counts"
        with unmetered():
            return self._surveys(step, cut, partition, rules)

    @contextmanager
    def around(self, step: Step) -> Iterator[None]:
        """Count every byte of the step where the budget is enforced always."""
        if self.options.enforce != "always" or self.loop.device.type == "cuda":
            yield
            return
        module = self.loop.module
        meter = ByteMeter(budget_bytes=self.options.budget_bytes)
        meter.track([*module.parameters(), *module.buffers()])
        meter.track(tensors_of([dict(step.optimizer.state), step.batch]))
        meter.track(p.grad for p in module.parameters() if p.grad is not None)
        with meter:
            yield
        self.record.peak_bytes = max(self.record.peak_bytes, meter.peak_bytes)

    def run(self, step: Step) -> tuple[Tensor | None, dict[str, Any]]:
        """Run the step's batch in micro-batches."""
        return self.runner.run(step)

    def drive(self, step: Step, optimize: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Take the optimizer step; retry it with smaller micro-batches after an OOM."""
        began_at = self.loop.steps_taken
        self._warn_where_split(step)
        with self.choice.timed(step):
            result = self.recovery.drive(step, optimize)
            size, (_, *sizes) = self.choice.size_in_use, self.runner.partition.form
        fastest = self.choice.faster_than_larger_ones
        if fastest:
            self.recovery.failed_sizes.forget_above(fastest)
        row_tokens, *chunks = sizes
        noted(self.record.history, PartsChange(began_at, size, row_tokens, step.batch_idx, *chunks))
        return result

    def _warn_where_split(self, step: Step) -> None:
        """Before the first batch that is split, name the hooks that run in every micro-batch."""
        partition = self.runner.partition
        if self._has_split or partition.keeps_whole:
            return
        if batch_size(step.batch) > partition.micro_batch_size:
            self._has_split = True
            _warn_of_hooks(self.loop)

    def _reconsidered(self, step: Step, error: ForeseenWronglyError, *, last: bool) -> None:
        """Draw the consequence of a batch whose loss was not the one that was proven."""
        generators = Generators()
        try:
            with unmetered():
                self.choice.reconsider(step, error, last=last)
        finally:
            generators.restore()

    def _resized(self, step: Step, *, retry: bool) -> None:
        """Tell the loop over how many micro-batches gradients are accumulated; count a retry."""
        partition = self.runner.partition
        rows = 1 if partition.keeps_whole else batch_size(step.batch)
        self.loop.set_gradient_parts(-(-rows // partition.micro_batch_size))
        if retry:
            self.record.retries += 1
            self._retried()


def _warn_of_hooks(run: Run) -> None:
    """Name the hooks that run once a micro-batch, where a batch is split."""
    names = run.hooks_by_micro_batch()
    if names:
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        warnings.warn(
            f"{shown}: runs in every micro-batch, on the gradients of that one, or of those so far. What changes or "
            "reads gradients belongs into on_before_optimizer_step, which runs once; or keep the batch whole "
            "(micro_batch_size = the loader's batch size). A callback that wants to see each micro-batch says so by "
            "an attribute, sees_micro_batches = True.",
            stacklevel=3,
        )
