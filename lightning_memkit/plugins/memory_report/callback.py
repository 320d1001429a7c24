"""Report where every byte of a training step went, and how the run goes."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightning_memkit.memory.anatomy import Anatomy
from lightning_memkit.memory.experts import ExpertBytes, expert_bytes
from lightning_memkit.memory.findings import Finding, fragmentation_of
from lightning_memkit.memory.measure import bytes_beside, fixed_bytes
from lightning_memkit.memory.origins import Place, places
from lightning_memkit.memory.out_of_memory import is_out_of_memory
from lightning_memkit.memory.report import StepReport
from lightning_memkit.memory.units import parse_bytes
from lightning_memkit.plugins.asked import budget_of, refuse_twin
from lightning_memkit.plugins.memory_report._facts import device_bytes, facts
from lightning_memkit.plugins.memory_report._files import ReportFiles
from lightning_memkit.plugins.memory_report._foresight import Foresight
from lightning_memkit.plugins.memory_report._line import (
    Printer,
    in_bar,
    loss_of,
    show_in_bar,
    to_loggers,
    validation_line,
)
from lightning_memkit.plugins.memory_report._meter import BatchMeter, is_compiled
from lightning_memkit.plugins.memory_report._rates import Rates, known_device
from lightning_memkit.plugins.memory_report._step_reports import failed_report, metered_report
from lightning_memkit.plugins.memory_report._watch import StepsWatch
from lightning_memkit.plugins.pickling import LeavesRunBehind, nothing
from lightning_memkit.plugins.seams import loaders
from lightning_memkit.plugins.seams.bars import log_above
from lightning_memkit.utilities.patching import Undo


def _no_time() -> float:
    return 0.0


class MemoryReport(LeavesRunBehind, Callback):
    """Prints a live line while training, and at the end the peak by category; the price is one metered step.

    The live line has loss, tokens (or samples) a second, the fraction of the device's peak FLOPs (MFU, if the
    peak is known), memory, peak and budget, the fraction of real tokens, the fraction of time spent waiting
    for the loader, and MemoryBudget's retries; the same values go to the loggers, a few to the progress bar.
    One step is metered operator by operator (tens of microseconds each). When training ends, its peak is
    printed by category, kind of operator and module, and written as JSON and as a self-contained HTML page
    that shows what was alive when. Findings follow, one a line: what is wasteful, its bytes, the line of
    code, and the remedy. In the first steps it also looks for leaks, tensors that every step leaves behind.
    For a mixture of experts it gives resident and active bytes. A step that runs out of memory gets a page of
    its own, with what was alive when it failed.

    Args:
        measured_step: the training batch that is metered, counted from 0; by default the second, when
            optimizer states exist. Without MemoryBudget and torch.compile, the batches before it are metered,
            too, to show what was alive if they run out of memory.
        live: print the line every `trainer.log_every_n_steps` batches, unless Lightning's bar shows its values.
        path: the JSON file, next to which the page is written; by default `memory_report.json` in the
            logger's folder, or else the trainer's.
        loss_name: the logged value that the line shows; by default the loss that `training_step` returns.
        watched_steps: the number of training batches in which every tensor is tracked to find leaks (tens of
            microseconds an operator): the first ones, or under MemoryBudget the first after its sizes have
            settled. 0 turns this off.
        least_bytes: smaller waste within a step is not reported; a size ("1MiB") or a count of bytes.
        predict: also predict the metered step, and show both side by side; takes seconds, once, in a fork.
        advise: predict what single changes would save and cost, and list them; takes about ten predictions.
    """

    watches_only = True
    of_run = {
        "_meter": nothing,
        "_watch": lambda: StepsWatch(0),
        "_outer": set,
        "_batch": nothing,
        "_rates": Rates,
        "_in_bar": dict,
        "_waited": lambda: _no_time,
        "_undo": list,
        "_files": nothing,
    }

    sees_micro_batches = True

    def __init__(
        self,
        measured_step: int = 1,
        live: bool = True,
        path: str | None = None,
        loss_name: str | None = None,
        watched_steps: int = 5,
        least_bytes: int | str = "1MiB",
        predict: bool = False,
        advise: bool = False,
    ) -> None:
        if measured_step < 0:
            raise ValueError(f"measured_step={measured_step} is negative; batches are counted from 0.")
        StepsWatch.check(watched_steps)
        parse_bytes(least_bytes)
        self.measured_step = measured_step
        self.live = live
        self.path = path
        self.loss_name = loss_name
        self.watched_steps = watched_steps
        self.least_bytes = least_bytes
        self.predict = predict
        self.advise = advise
        self.report: StepReport | None = None
        self.failed: StepReport | None = None
        self.findings: tuple[Finding, ...] = ()
        self._meter: BatchMeter | None = None
        self._foresight = Foresight(predict=predict, advise=advise)
        self._watch = StepsWatch(0)
        self._outer: set[Place] = set()
        self._batches = 0
        self._batch: Any = None  # the current one, which Lightning holds, too
        self._process_bytes = self._live_bytes = 0
        self._rates = Rates()
        self._in_bar: dict[str, str] = {}
        self._waited = _no_time
        self._undo: list[Undo] = []
        self._printer = Printer()
        self._files: ReportFiles | None = None

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={getattr(self, name)!r}" for name in signature(MemoryReport).parameters)
        return f"MemoryReport({options})"

    @property
    def anatomy(self) -> Anatomy | None:
        """The anatomy of the metered step's peak; None before it is metered."""
        return None if self.report is None else self.report.anatomy

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record what the process holds besides tensors, and start timing the waits for data."""
        refuse_twin(trainer, self)
        self._give_back()
        self.report, self.failed, self.findings, self._batches = None, None, (), 0
        self._outer = places()
        self._watch = StepsWatch(self.watched_steps, self._outer)
        self._foresight = Foresight(predict=self.predict, advise=self.advise)
        self._process_bytes = bytes_beside(pl_module)
        self._waited, undo = loaders.time_data_waits(trainer)
        self._in_bar, self._rates = {}, Rates()
        self._files = ReportFiles(trainer, self.path, self._printer)
        self._undo += [undo, show_in_bar(trainer, self._in_bar), log_above(trainer)]

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Enter the meter for the measured step, and the leak watch in the first ones."""
        self._batch = batch
        if self._batches == 0:
            self._foresight.before_first(trainer, batch)
        self._watch.enter(budget_of(trainer), self._batches)
        if self._batches > self.measured_step or self._meter is not None:
            return
        if self._batches < self.measured_step and (budget_of(trainer) or is_compiled(pl_module)):
            return
        self._meter = BatchMeter(trainer, batch, least_bytes=parse_bytes(self.least_bytes), outer=self._outer)
        self._meter.enter()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Mark the end of a micro-batch's forward."""
        if self._meter is not None:
            self._meter.end_forward()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Mark the end of a micro-batch's backward; another forward may follow."""
        if self._meter is not None:
            self._meter.end_backward()

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Mark the beginning of the optimizer's step."""
        if self._meter is not None:
            self._meter.begin_optimizer()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Leave the meter and the watch; log and print the live line."""
        self._leave_meter(trainer, batch)
        self._batch = None
        self._watch.leave()
        if self._watch.is_complete:
            self._judge(trainer, pl_module)
        self._batches += 1
        self._rates.count(batch)
        every: int = vars(trainer)["log_every_n_steps"]  # 0, as barebones=True sets it, is never
        if not every or self._batches % every:
            return
        flops = None if self.report is None else self.report.flops
        values = self._rates.take(self._waited(), flops, known_device(trainer.strategy.root_device))
        values |= device_bytes(trainer, self.anatomy, self._live_bytes)
        to_loggers(trainer, values)
        self._in_bar.update(in_bar(values))
        if self.report is not None:
            self.report = replace(self.report, rates=values)
        if self.live:
            self._printer.show_step(trainer, loss_of(trainer, outputs, self.loss_name), values)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the logged values whose names begin with "val"."""
        if self.live and (text := validation_line(trainer)):
            self._printer.show(trainer, text)
        self._rates.restart(self._waited())

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drop the meter of a batch whose start ended the epoch: it was not stepped."""
        self._drop_meter()
        self._watch.drop()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the peak and what would help most, and write JSON and page."""
        self._drop_meter()
        self._judge(trainer, pl_module)
        self.findings += fragmentation_of(trainer.strategy.root_device)
        if self.report is not None and self._files is not None:
            run = replace(self.report.run, retries=facts(trainer, self._batches).retries)
            self.report = replace(self.report, run=run).with_findings(self.findings)
            self._files.write(self.report)
        found = () if self.report is not None else self.findings
        self._print_lines(trainer, (*found, *filter(None, [expert_bytes(pl_module)])))

    def on_out_of_memory(self, trainer: Trainer, error: BaseException) -> None:
        """Report a step that ran out of memory while its tensors are alive; MemoryBudget calls this."""
        try:
            self._take_apart(trainer, error)
        except Exception as own:  # the step's own error, or its retry, is what matters
            warnings.warn(f"MemoryReport can't tell what lived when memory ran out: {own}", stacklevel=2)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Report a step that ran out of memory, and undo: Lightning calls no teardown after an error."""
        try:
            is_known = self.failed is not None and self.failed.run.step == self._batches
            if is_out_of_memory(exception) and not is_known:
                self.on_out_of_memory(trainer, exception)
        finally:
            self._give_back()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove the profiler's hooks."""
        self._give_back()

    def _take_apart(self, trainer: Trainer, error: BaseException) -> None:
        fixed = self._fixed_bytes(trainer)
        self.failed = failed_report(trainer, self._batches, self._meter, fixed, self._batch, error)
        if self._files is not None:
            self._files.write_failed(self.failed)

    def _give_back(self) -> None:
        self._drop_meter()
        self._watch.drop()
        self._batch = None
        while self._undo:
            self._undo.pop()()

    def _drop_meter(self) -> None:
        """Leave the meter of a step that failed or was skipped."""
        if self._meter is not None:
            self._meter.leave()
            self._meter = None

    def _leave_meter(self, trainer: Trainer, batch: Any) -> None:
        if self._meter is None:
            return
        meter, self._meter = self._meter, None
        if self._batches == self.measured_step and self._files is not None:
            self._files.write_snapshot()
        meter.leave()
        if self._batches == self.measured_step:
            self._foresight.after_metered(trainer, batch)
            fixed, foresight = self._fixed_bytes(trainer), self._foresight
            self.report = metered_report(trainer, self._batches, meter, fixed, foresight, advised=self.advise)
            self.findings += tuple(meter.findings())
            self._live_bytes = meter.live_bytes
        meter.forget()

    def _fixed_bytes(self, trainer: Trainer) -> int:
        device = trainer.strategy.root_device
        return fixed_bytes(device) if device.type == "cuda" else self._process_bytes

    def _judge(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the leaks that were found in the watched steps at once, since they grow."""
        found = self._watch.findings(trainer, pl_module)
        self.findings += found
        if self.live:
            self._print_lines(trainer, found)

    def _print_lines(self, trainer: Trainer, lines: Sequence[Finding | ExpertBytes]) -> None:
        for one in lines:
            self._printer.show(trainer, f"memory report: {one}")
