"""Trial steps that leave no trace: the gradient of a batch, and the peak of a micro-batch."""

import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_debug
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memkit.memory.measure import AllocatorMeter, PeakMeter, peak_meter
from lightning_memkit.memory.out_of_memory import is_out_of_memory
from lightning_memkit.micro_batching import (
    SplitError,
    SplittableBatch,
    batch_size,
    decomposability,
    split_batch,
)
from lightning_memkit.micro_batching.batch_counts import Foretelling
from lightning_memkit.micro_batching.composition import Left, compose
from lightning_memkit.micro_batching.foreseen import ForeseenWronglyError, UnforeseenLossError
from lightning_memkit.micro_batching.lone_counts import WHOLE, LoneCounts, Look, saving_shapes_only
from lightning_memkit.micro_batching.loss_rules import Law, LossRules
from lightning_memkit.micro_batching.loss_walk import terms_of
from lightning_memkit.micro_batching.rollback import Rollback
from lightning_memkit.micro_batching.state_walk import Keys
from lightning_memkit.micro_batching.step_changes import StepChange, label
from lightning_memkit.micro_batching.step_shares import least_divisors, looked_at
from lightning_memkit.micro_batching.term_values import TermValues
from lightning_memkit.micro_batching.without_noise import quiet
from lightning_memkit.optim.closures import trial_step
from lightning_memkit.optim.compensation import compensation_of
from lightning_memkit.optim.journal import journal_of
from lightning_memkit.optim.methods import uses_closure_its_own_way
from lightning_memkit.optim.snapshots import (
    forget_new_states,
    known_states,
    restore_snapshot,
    take_snapshot,
)
from lightning_memkit.plugins import _seam
from lightning_memkit.plugins._partition import Cut, Partition, rows_together
from lightning_memkit.plugins._ranks import Ranks, any_rank, largest_of_ranks, local_optimizer, sum_of_ranks
from lightning_memkit.utilities.generators import Generators
from lightning_memkit.utilities.tensors import tensors_of

_Named = tuple[str, str]  # a change's kind and name
_TAKEN_FOR_A_SUM = (
    "MemoryBudget takes a term of the loss for a sum over the batch: training_step divides (or multiplies) it by the "
    "same number in each micro-batch, and in two of them as one. The whole batch, which would prove it, does not fit. "
    "A constant is all right; of a count that is kept from being less (clamp(min=...), max(n, ...)), divide by a "
    "number that adds up, or keep micro_batch_size at the loader's batch size."
)


class PassedOverError(ForeseenWronglyError):
    """training_step returned None on a rank whose backward the others wait for: the trial ends on all of them."""


class StepFailedError(Exception):
    """The user's step raised on a batch that it was given for a trial."""

    def __init__(self, cause: Exception, *, skipped: bool) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.skipped = skipped  # it returned None, as it may to skip a batch


@dataclass(kw_only=True)
class Values:
    """What a step logs, and returns beside its loss.

    Attributes:
        drew: whether it drew random numbers of torch.
        drew_elsewhere: whether it drew some of Python or NumPy.
    """

    logged: list[dict[str, Any]]
    returned: dict[str, Any]
    drew: bool
    drew_elsewhere: bool


class Trials:
    """Runs trial steps of a module; weights, optimizer, RNG, buffers, metrics and logs end as they began.

    Args:
        trainer: the trainer, within its training loop.
        transfer: moves a part to the device.
        budget_bytes: what a probe's tensors may take on the host; an accelerator's allocator keeps its own cap.

    Attributes:
        changes: what the step of the latest `gradient_of` or `peak_of` changes besides gradients, each time that it
            runs: what a first step sets up once and a second one leaves alone (a mask that is built lazily) is not in.
        changing: the keys of all tensors that trials saw changed in place; a `Rollback` clones these.
        logged: what the step of the latest `gradient_of` logged.
        handed_on: the attributes that the batch before (`after=`) had set.
        returned: what the step of the latest run returned beside its loss.
        values: the numbers that the step of the latest `gradient_of` with `look=` has computed, by their nodes.
        between: called after the batch before (`after=`) has run.
        capture: called within `gradient_of` once the step has run; `captured` is what it gave.
    """

    def __init__(
        self, trainer: Trainer, transfer: Callable[[Any], Any], budget_bytes: int | None = None
    ) -> None:
        self.changing: frozenset[tuple[str, str]] = frozenset()
        self.changes: tuple[StepChange, ...] = ()
        self.logged: list[dict[str, Any]] = []
        self.handed_on: list[str] = []
        self.returned: dict[str, Any] = {}
        self.values: dict[tuple[Any, int], Tensor] = {}
        self.capture: Callable[[], Any] | None = None
        self.captured: Any = None
        self.between: Callable[[], None] | None = None
        self.limited = False
        self.ranks = Ranks()
        self._has_watched = False
        self._took_for_sums = False  # which was said
        self._too_many_rows: float = float("inf")  # of a whole batch that can't be run
        self._differentiates = False  # the step does within itself, and needs all that autograd saves
        self._once: set[_Named] = set()  # changes that a second step does not repeat
        self._always: dict[_Named, StepChange] = {}
        self._judged: set[_Named] = set()  # those of which it is known whether they compose
        self._trainer = trainer
        self._transfer = transfer
        self._budget_bytes = budget_bytes

    @property
    def _module(self) -> LightningModule:
        return self._trainer.lightning_module

    @contextmanager
    def _no_trace(
        self, step: _seam.Step, *parts: Any, seen: bool = False, after_backward: bool = False
    ) -> Iterator[list[dict[str, Any]]]:
        unwatched = self._has_watched and self._sees_too_little() and not seen
        rollback = self._rollback = self._kept(step, *parts, changing=self.changing if unwatched else None)
        # The last step's gradients are zeroed before they are used: held beside the trial's they would cost twice.
        # A step that uses its closure in a way of its own may look at them before.
        zeroed = step.starts_window and not after_backward and not uses_closure_its_own_way(step.optimizer)
        kept = [] if zeroed else [(p, p.grad) for p in self._module.parameters()]
        for parameter in self._module.parameters():
            parameter.grad = None
        try:
            with (
                _seam.logging_held(self._trainer) as logged,
                _seam.loggers_silent(self._trainer),
                torch.enable_grad(),
                nullcontext() if unwatched else rollback.watching(),
            ):
                yield logged
        finally:
            self.changing |= rollback.changed()
            lost = rollback.restore()
            for parameter in self._module.parameters():
                parameter.grad = None
            for parameter, gradient in kept:
                parameter.grad = gradient
        if lost:
            warnings.warn(
                f"A trial step changed {', '.join(sorted(label(*key) for key in lost))} by a kernel that PyTorch's "
                "dispatcher does not see: these keep what the trial left. Register the kernel as an operator that "
                "names what it writes to (torch.library.custom_op with mutates_args).",
                stacklevel=2,
            )

    def _kept(self, step: _seam.Step, *parts: Any, changing: Keys | None = None) -> Rollback:
        """The state before a step that a trial puts back."""
        return Rollback(self._module, changing, batches=[step.batch, *parts], beside=beside(step))

    @contextmanager
    def materialized(self, step: _seam.Step) -> Iterator[None]:
        """Within it lazy modules have the shapes that a forward of some rows gives them; then they are lazy again.

        So the first step draws their weights itself, from the random numbers that it has without trials. Costs a
        forward, and nothing where no module is lazy.
        """
        rollback = self._kept(step)
        lazy = rollback.uninitialized()
        if not lazy:
            yield
            return
        rows = _rows(step.batch)
        some = split_batch(step.batch, [2, rows - 2])[0] if rows > 2 else step.batch
        try:
            with _seam.logging_held(self._trainer), _seam.loggers_silent(self._trainer), rollback.watching():
                step.forward(self._transfer(some))
            rollback.restore(but=lazy)
            yield
        finally:
            rollback.restore()

    def gradient_of(
        self,
        step: _seam.Step,
        batch: Any,
        *,
        seed: int | None = None,
        after: Any = None,
        look: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """A sample of the gradient that a batch's own loss has; `seed` draws other random numbers than training.

        `logged` then holds what the step logged. With `after`, another batch's step comes first, with the same random
        numbers, and leaves behind what it leaves behind; `handed_on` names the attributes that it has set. `look` is
        given the loss, and what it returns is differentiated.
        """
        with self._no_trace(step, batch, after, seen=True) as self.logged:
            if seed is not None:
                random.seed(seed)
                np.random.seed(seed)
                torch.manual_seed(seed)
            skipped = False
            if after is not None:
                self._run_before(step, after)
            try:
                skipped = not self._run(step, batch, self._limit(step), look)
                if skipped:
                    raise ValueError("training_step returned None")
            except Exception as error:
                raise StepFailedError(error, skipped=skipped) from error
            gradient = decomposability.sampled_gradient(self._module.parameters())
            self.captured = None if self.capture is None else self.capture()
            returned, values = self.returned, self.values
            self._note_changes(step, batch, self.logged)
            self.returned, self.values = returned, values  # not what further steps gave
            return gradient

    def loss_of(self, step: _seam.Step, batch: Any) -> float | None:
        """The loss of a batch; None where the step fails on it or passes over it."""
        losses: list[float] = []

        def look(loss: Tensor) -> Tensor:
            losses.append(float(loss.detach()))
            return loss

        with self._no_trace(step, batch, seen=True):
            try:
                self._run(step, batch, self._limit(step), look)
            except Exception as error:  # of a row alone: what the step makes of several is asked elsewhere
                rank_zero_debug(f"MemoryBudget can't try a row by itself: {error!r}")
                return None
        return losses[0] if losses else None

    def _note_changes(self, step: _seam.Step, batch: Any, logged: list[dict[str, Any]]) -> None:
        """Tell what every step changes from what only the first one does, and what composes from micro-batches.

        Costs three more steps, once for all changes of a name; none where a step changes nothing.
        """
        self.changing |= self._rollback.changed()  # before further runs put something back
        found, rows, count = self._rollback.changes(), _rows(batch), len(logged)
        # One or two rows can't be split into unlike parts: what composes is asked for again when there are more.
        known = self._once | self._judged | (self._always.keys() if rows < 3 else set())
        unknown = {_named(change) for change in found} - known
        if not self.ranks.reason and self.ranks.any(bool(unknown)):
            again = self._changes_of_a_second_step(step, batch)
            del logged[count:]
            if again is not None:
                # What was judged without batch statistics is not judged again with them.
                again = {named: change for named, change in again.items() if named not in self._judged}
                self._always.update(again)
                self._judged |= again.keys() if rows > 2 else set()
                self._once = (self._once | unknown) - self._always.keys()
                found = (*found, *again.values())
        self.changes = tuple(
            {self._always.get(_named(c), c): None for c in found if _named(c) not in self._once}
        )

    def _changes_of_a_second_step(self, step: _seam.Step, batch: Any) -> dict[_Named, StepChange] | None:
        """What the step changes on other rows, after the first; and which of it parts of them change alike."""
        rows = other_rows(step.batch, batch)
        rollback = self._kept(step, rows)
        try:
            with rollback.watching():
                self._run(step, rows)
        except Exception as error:  # on these rows only: the first step itself went well
            rank_zero_debug(f"MemoryBudget can't try a second step: {error!r}")
            return None
        again, left = rollback.changes(), rollback.left_behind()
        self.changing |= rollback.changed()
        composed = self._composed(step, rows, rollback, left) if again else frozenset()
        if set(again) - composed:
            composed |= self._composed_without_noise(step, rows)
        return {_named(change): replace(change, composes=change in composed) for change in again}

    def _composed_without_noise(self, step: _seam.Step, rows: Any) -> frozenset[StepChange]:
        """The changes that parts leave as their whole in eval mode: dropout draws other numbers for a part."""
        with quiet(self._module, 2):
            rollback = self._kept(step, rows)
            try:
                with rollback.watching():
                    self._run(step, rows)
            except Exception as error:  # a module may not be made for a step in eval mode
                rank_zero_debug(f"MemoryBudget can't try a step in eval mode: {error!r}")
                return frozenset()
            return self._composed(step, rows, rollback, rollback.left_behind())

    def _composed(self, step: _seam.Step, rows: Any, rollback: Rollback, left: Left) -> frozenset[StepChange]:
        """The changes that two micro-batches of unlike size leave as the whole of them does.

        What the second leaves by itself, too, it may have put in the place of what the first has left: of such changes
        the micro-batches run in the other order as well.
        """
        total = _rows(rows)
        if total < 3:
            return frozenset()
        # Two equal halves would pass off a mean of means as the mean.
        first = total // 2 if total % 2 else total // 2 - 1
        rollback.restore()
        try:
            one, other = split_batch(rows, [first, total - first])
            with rollback.watching():
                self._run(step, one)
                self._run(step, other)
            composed = compose(left, rollback.left_behind())
            if not composed:
                return composed
            rollback.restore()
            with rollback.watching():
                self._run(step, other)
                doubtful = compose(left, rollback.left_behind()) & composed
                if doubtful:
                    self._run(step, one)
            return composed - doubtful | (doubtful & compose(left, rollback.left_behind()))
        except Exception as error:  # a part may have too few rows for the module
            rank_zero_debug(f"MemoryBudget can't try a step in parts: {error!r}")
            return frozenset()

    def values_of(self, step: _seam.Step, batch: Any, *, gradient: bool) -> Values:
        """What a step logs and returns of some rows, by a forward after the batch's own backward; gradients stay.

        Args:
            step: whose rows they are.
            batch: the rows.
            gradient: whether the forward keeps what a backward needs.

        Raises:
            StepFailedError: the step fails on them, or passes them over.
        """
        with self._no_trace(step, batch, after_backward=True) as logged:
            generators = Generators()
            try:
                with torch.set_grad_enabled(gradient):
                    loss, returned = step.forward(self._transfer(batch))
            except Exception as error:
                raise StepFailedError(error, skipped=False) from error
            if loss is None:
                raise StepFailedError(ValueError("training_step returned None"), skipped=True)
            drew, elsewhere = generators.drawn_from()
            return Values(logged=list(logged), returned=returned, drew=drew, drew_elsewhere=elsewhere)

    def survey(self, step: _seam.Step, cut: Cut, partition: Partition, rules: LossRules) -> list[float]:
        """What the terms of a loss count in all micro-batches together: a forward of each, without a backward.

        Ranks have one batch between them: it is what all count, divided by the number of ranks. Each forward begins
        with the same state, as in training. Where nothing tells whether a micro-batch counts what it is divided by,
        one more forward of it and another as one, or of the whole batch, in which autograd saves shapes alone.

        Raises:
            UnforeseenLossError: a micro-batch's loss has other terms, or such a look failed.
        """
        told = partition.foretold
        found = self._lone_counts(step, partition, rules)
        with self._no_trace(step, *cut.parts):
            if partition.state is not None:
                partition.state.begin()
            for counts, lone, _ in self._each_counted(step, cut.parts, partition, rules):
                found.counts.append(counts)
                found.lone.append(lone)
            while any_rank(self._trainer, bool(found.looks())):
                asked = found.looks()
                self._look(step, cut, partition, found)
                if not any_rank(self._trainer, found.looks() != asked):
                    break  # these can't be run
            self.ranks.forget_part()
        totals = found.totals()
        if any_rank(self._trainer, totals is None) or totals is None:
            raise UnforeseenLossError(found.why)
        for index in found.terms:
            shown = found.shown(index, totals[index])
            if index in found.sums:
                told.confirm_sum(index, shown)
            else:
                told.confirm(index, step.batch, totals[index], shown)
        if found.unproven and not self._took_for_sums:
            self._took_for_sums = True
            warnings.warn(_TAKEN_FOR_A_SUM, stacklevel=2)
        return self._of_all_ranks(totals, [found.least(index) for index in range(len(totals))])

    def _of_all_ranks(self, totals: Sequence[float], least: Sequence[float]) -> list[float]:
        """Totals averaged as gradients are; where they come to less, the least that the batch is divided by."""
        trainer = self._trainer
        summed, kept = sum_of_ranks(trainer, totals), largest_of_ranks(trainer, least)
        return [max(pair, key=abs) / trainer.world_size for pair in zip(summed, kept, strict=True)]

    def _lone_counts(self, step: _seam.Step, partition: Partition, rules: LossRules) -> LoneCounts:
        """What is to be looked up, of no micro-batch yet."""
        told, is_alone = partition.foretold, self._trainer.world_size == 1
        of_no_law = {index for index in rules.looked_up if rules.rules[index].law is Law.OWN}
        return LoneCounts(
            counts=[],
            lone=[],
            whole=told.unlike() | of_no_law,
            sums=rules.looked_up - of_no_law,
            doubted=told.doubted() if is_alone else frozenset(),
            runs_whole=not is_alone or _rows(step.batch) < self._too_many_rows,
            adjacent=partition.split is not None or isinstance(step.batch, SplittableBatch),
            adds_up=not is_alone,
        )

    def _look(self, step: _seam.Step, cut: Cut, partition: Partition, found: LoneCounts) -> None:
        """Run micro-batches as one, as far as this can be; nothing is learned of those that can't."""
        assert partition.rules is not None
        looks, rows = [], []
        for look in found.looks():
            together = _rows_of(step.batch, cut, partition, look, adjacent=found.adjacent)
            if together is not None:
                looks.append(look)
                rows.append(together)
        try:
            saved = nullcontext() if self._differentiates else saving_shapes_only()
            with self._within_budget(step) or nullcontext(), saved:
                for index, (_, _, told) in enumerate(
                    self._each_counted(step, rows, partition, partition.rules)
                ):
                    found.learn(looks[index], told)
        except Exception as error:
            # Two micro-batches may be more than there is memory for, or than the step allows. Ranks retry together.
            if self._trainer.world_size > 1 or isinstance(error, ForeseenWronglyError):
                raise
            rank_zero_debug(f"MemoryBudget can't look at parts as one: {error!r}")
            if WHOLE in looks and found.runs_whole:
                found.runs_whole = False
                self._too_many_rows = min(self._too_many_rows, _rows(step.batch))

    def _each_counted(
        self, step: _seam.Step, parts: Sequence[Any], partition: Partition, rules: LossRules
    ) -> Iterator[tuple[tuple[float, ...], frozenset[int], tuple[float, ...]]]:
        """Of each of some rows, what terms count, which are divided by 1 for an unknown reason, and `looked_at`."""
        least = [_one_row(step.batch)]  # for ranks that have nothing to run while others do
        for index in range(self.ranks.most_parts(len(parts))):
            part = (parts or least)[min(index, max(len(parts) - 1, 0))]
            if partition.state is not None:
                partition.state.begin_anew()
            found = self.ranks.part(
                lambda part=part: self._counted(step, part, rules, partition.foretold),
                counts=False,
                smallest=lambda part=part: step.forward(self._transfer(_one_row(part))),
                kind="survey",
            )
            if index < len(parts):
                yield found

    def _counted(
        self, step: _seam.Step, part: Any, rules: LossRules, foretold: Foretelling
    ) -> tuple[tuple[float, ...], frozenset[int], tuple[float, ...]]:
        with TermValues() as noted:
            loss, _ = step.forward(self._transfer(part))
        self._differentiates = self._differentiates or noted.differentiates
        if loss is None:
            nothing = (0.0,) * len(rules.rules)
            return nothing, frozenset(), nothing
        reading = rules.read(terms_of(loss))
        own = list(rules.counts(reading, loss, noted.values))
        least = least_divisors(rules, reading, foretold, part)
        for index in least.lone:
            own[index] = reading.divisors[index]
        for index, count in least.counts.items():
            own[index] = count
        return tuple(own), least.lone, looked_at(rules, reading, own)

    def _run_before(self, step: _seam.Step, batch: Any) -> None:
        generators = Generators()
        self._run(step, batch, self._limit(step))
        generators.restore()
        if self.between is not None:
            self.between()
        self.handed_on = self._rollback.replaced()
        for parameter in self._module.parameters():
            parameter.grad = None

    def _limit(self, step: _seam.Step) -> PeakMeter | None:
        """What refuses a probe that needs more than training may, where no allocator does."""
        return self._within_budget(step) if self.limited else None

    def _within_budget(self, step: _seam.Step) -> PeakMeter | None:
        device = self._trainer.strategy.root_device
        if self._budget_bytes is None or device.type != "cpu":
            return None
        held = [*self._module.parameters(), *self._module.buffers(), *tensors_of(step.batch)]
        held += states_on(device, local_optimizer(step.optimizer))
        return peak_meter(device, held, self._budget_bytes)

    def _run(
        self,
        step: _seam.Step,
        batch: Any,
        meter: PeakMeter | None = None,
        look: Callable[[Tensor], Tensor] | None = None,
    ) -> bool:
        """Forward and backward of a part; whether it has a loss."""

        def run(part: Any) -> bool:
            with TermValues() if look is not None else nullcontext() as noted:
                loss, self.returned = step.forward(self._transfer(part))
            self.values = {} if noted is None else noted.values
            if loss is None:
                if self.ranks.meets:  # in a backward, where the others wait
                    raise PassedOverError("training_step returned None")
                return False
            step.quiet_backward(loss if look is None else look(loss))
            return True

        def measured() -> bool:
            if meter is None:
                return run(batch)
            with meter:
                return run(batch)

        return self.ranks.part(measured, smallest=lambda: run(_one_row(batch)))

    @contextmanager
    def optimizer_state(self, step: _seam.Step) -> Iterator[tuple[list[Tensor], int]]:
        """Within it the optimizer's state exists as after a step, taken without gradient; then all is put back.

        Weights, states, group scalars and compensation are bitwise as before; their copies lie on the host
        meanwhile. Yields the state's tensors and the peak of the step.
        """
        optimizer = local_optimizer(step.optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        gradients = [(p, p.grad) for p in parameters]
        known = known_states(optimizer)
        try:
            peak = self._stepped_and_back(step, parameters)
            yield states_on(self._trainer.strategy.root_device, optimizer), peak
        finally:
            for p, gradient in gradients:
                p.grad = gradient
            forget_new_states(optimizer, known)

    def _stepped_and_back(self, step: _seam.Step, parameters: list[nn.Parameter]) -> int:
        """The peak of a step; what it has changed is as before, what it has made stays.

        Its copies are gone before parts are tried: on a CPU the host is the device.
        """
        optimizer = local_optimizer(step.optimizer)
        owner: Any = compensation_of(optimizer)
        host = torch.device("cpu")
        snapshot = owner.snapshot(device=host) if owner else take_snapshot(optimizer, device=host)
        try:
            return self._step_without_gradient(step, parameters)
        finally:
            if owner:
                owner.restore(snapshot, keep_new=True)
            else:
                restore_snapshot(optimizer, snapshot, keep_new=True)

    def _step_without_gradient(self, step: _seam.Step, parameters: list[nn.Parameter]) -> int:
        self._allocate_gradients(parameters)
        held = [*self._module.parameters(), *self._module.buffers(), *tensors_of(step.batch)]
        held += [p.grad for p in parameters if p.grad is not None]
        device = self._trainer.strategy.root_device
        # ZeRO's own step would send what is put back here to ranks that have no copy of it.
        optimizer = local_optimizer(step.optimizer)
        held += states_on(device, optimizer)
        meter = peak_meter(device, held)
        try:
            with meter, _without_hooks(optimizer):
                journal = journal_of(optimizer)
                # A device that is too full for copies leaves them to the host: they need not fit.
                counts_copies = device.type == "cpu" or journal is None
                with nullcontext() if counts_copies or journal is None else journal.paused():
                    # A journal knows a trial by its gradients, and gives it the closure that it may ask for.
                    trial_step(optimizer) if journal is None else optimizer.step()
                if journal is not None:
                    with journal.measuring():
                        optimizer.step()
                    if journal.needed and counts_copies:  # those of states, which a first step does not have
                        optimizer.step()
        except (RuntimeError, TypeError) as error:  # sparse gradients only, or a closure is asked for
            if is_out_of_memory(error):
                raise
            warnings.warn(
                f"MemoryBudget could not try a step of {type(optimizer).__name__} ({error}); its state is "
                "not in the verified peak.",
                stacklevel=2,
            )
        return meter.peak_bytes

    def _allocate_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        for p in parameters:
            if p.requires_grad:
                p.grad = torch.zeros_like(p, dtype=getattr(p, "grad_dtype", None) or p.dtype)

    def peak_of(
        self, step: _seam.Step, batch: Any, resident: list[Tensor], budget_bytes: int | None
    ) -> int | None:
        """The peak of forward and backward of one part, weights, gradients and `resident` included; None: OOM.

        Raises:
            StepFailedError: the step raised on fewer rows than the batch has (batch normalization of one row, say):
                it does not run at this size. On the whole batch the user's own error comes out as it is.
        """
        if self._sees_too_little():
            self._watch_first(step, batch)
        failed = False
        with self._no_trace(step, batch) as logged:
            self._allocate_gradients(self._module.parameters())  # in a step's later parts all are alive
            held = [*self._module.parameters(), *self._module.buffers(), *resident]
            held += [p.grad for p in self._module.parameters() if p.grad is not None]
            meter = peak_meter(self._trainer.strategy.root_device, held, budget_bytes)
            try:
                self._run(step, batch, meter)
            except ForeseenWronglyError:
                rank_zero_debug("MemoryBudget measures a batch that the module passes over.")
            except Exception as error:
                if not is_out_of_memory(error):
                    self._raise(step, batch, error)
                failed = True
            if not failed:
                self._has_watched = True
                self._note_changes(step, batch, logged)
        return None if failed else meter.peak_bytes

    def _raise(self, step: _seam.Step, batch: Any, error: Exception) -> NoReturn:
        """The user's own error, of the whole batch as it is."""
        if _rows(batch) < _rows(step.batch):
            raise StepFailedError(error, skipped=False) from error
        raise error

    def _sees_too_little(self) -> bool:
        """Whether a peak has to be measured with compiled functions, within which a trial does not see writes."""
        return "torch._dynamo" in sys.modules and AllocatorMeter.counts(self._trainer.strategy.root_device)

    def _watch_first(self, step: _seam.Step, batch: Any) -> None:
        """See what the step writes to before it is run unwatched.

        Probes don't count as seen: in eval mode, or with the batch's own statistics, a step writes to less. Nor does
        a run that was broken off.
        """
        if self._has_watched:
            return
        with self._no_trace(step, batch), suppress(RuntimeError, MemoryError):
            self._run(step, batch)
            self._has_watched = True


def states_on(device: torch.device, optimizer: Optimizer) -> list[Tensor]:
    """The states of an optimizer that are in a device's memory; others may be kept in the host's."""
    return [state for state in tensors_of(dict(optimizer.state)) if state.device.type == device.type]


@contextmanager
def _without_hooks(optimizer: Optimizer) -> Iterator[None]:
    """The user's step hooks (an EMA, say) are not to hear of a trial."""
    hooks: tuple[Any, ...] = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    kept = [dict(registered) for registered in hooks]
    for registered in hooks:
        registered.clear()
    try:
        yield
    finally:
        for registered, before in zip(hooks, kept, strict=True):
            registered.update(before)


_HOOKS_IN_A_STEP = (
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)


def beside(step: _seam.Step) -> dict[str, Any]:
    """What a step may change besides the module: its optimizers' settings, and callbacks whose hooks run within it."""
    found: dict[str, Any] = {}
    for index, optimizer in enumerate(step.trainer.optimizers):
        for number, group in enumerate(optimizer.param_groups):
            found[f"optimizers[{index}].param_groups[{number}]"] = group
    for callback in vars(step.trainer)["callbacks"]:
        hears = any(getattr(type(callback), hook) is not getattr(Callback, hook) for hook in _HOOKS_IN_A_STEP)
        if hears and not type(callback).__module__.startswith(
            ("lightning_memkit.", "lightning.", "pytorch_lightning.")
        ):
            found[type(callback).__name__] = callback
    return found


def other_rows(whole: Any, batch: Any) -> Any:
    """As many rows of the whole batch as a trial's have, others as far as there are: its last ones."""
    total, rows = _rows(whole), _rows(batch)
    return split_batch(whole, [total - rows, rows])[1] if 0 < rows < total else batch


def _rows_of(batch: Any, cut: Cut, partition: Partition, look: Look, *, adjacent: bool) -> Any:
    """The rows of a look; None where they can't be put together."""
    if look is None:  # `WHOLE`
        return batch
    together = rows_together(batch, cut, partition.split, *sorted(look), adjacent=adjacent)
    return None if together is None else together[0]


def _one_row(batch: Any) -> Any:
    rows = batch_size(batch)
    return split_batch(batch, [1, rows - 1])[0] if rows > 1 else batch


def _rows(batch: Any) -> int:
    """How many rows there are to split, 0 where that is not known."""
    try:
        return batch_size(batch)
    except SplitError:
        return 0


def _named(change: StepChange) -> _Named:
    return change.kind, change.name
