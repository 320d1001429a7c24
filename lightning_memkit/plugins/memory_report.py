"""Show where every byte of a training step went, and how the run goes, in the field's terms."""

import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from rich.console import Console
from torch import Tensor
from torch.optim import Optimizer

from lightning_memkit.memory.anatomy import Anatomy
from lightning_memkit.memory.experts import ExpertBytes, expert_bytes
from lightning_memkit.memory.findings import Finding, fragmentation
from lightning_memkit.memory.measure import fixed_bytes, process_bytes
from lightning_memkit.memory.origins import Place, places
from lightning_memkit.memory.temporaries import TemporariesMeter
from lightning_memkit.memory.units import format_bytes, parse_bytes
from lightning_memkit.plugins import _seam
from lightning_memkit.plugins._report_rates import Rates
from lightning_memkit.plugins._report_table import anatomy_table
from lightning_memkit.plugins._report_watch import StepsWatch
from lightning_memkit.plugins._tensors import tensors_of
from lightning_memkit.plugins._trials import states_on
from lightning_memkit.plugins.memory_budget import MemoryBudget


class MemoryReport(Callback):
    """Prints a live line while training and at the end a table of the peak by category; one metered step.

    The live line has loss, tokens (or samples) a second, memory and budget, the share of real tokens, and the share
    of time spent waiting for the loader; the same values go to the loggers. One step is metered operator by
    operator (tens of microseconds each); its anatomy is printed when training ends and written as JSON. With it come
    findings, a line each: what is wasteful, its bytes, the line that makes it, and the remedy. Tensors that every step
    leaves behind are looked for in the first steps. Of a mixture of experts it tells what is resident from what a
    token finds active.

    Args:
        measured_step: the training batch that is metered, counted from 0; the second one by default, when the
            optimizer's state exists.
        live: print the line every `trainer.log_every_n_steps` batches.
        path: the JSON file; by default `memory_report.json` in the logger's folder, or the trainer's.
        loss_name: the logged value that the line shows; by default what `training_step` returns.
        watched_steps: training batches in which every tensor is followed, to find those that are never let go (tens
            of microseconds an operator); the first ones, or under MemoryBudget the first after it has settled. 0
            looks for none.
        least_bytes: waste within a step that is smaller is not named, as a size ("1MiB") or a count of bytes.
    """

    def __init__(
        self,
        measured_step: int = 1,
        live: bool = True,
        path: str | None = None,
        loss_name: str | None = None,
        watched_steps: int = 5,
        least_bytes: int | str = "1MiB",
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
        self.anatomy: Anatomy | None = None
        self.findings: tuple[Finding, ...] = ()
        self._meter: TemporariesMeter | None = None
        self._stance: Any = None  # torch's, while the meter is entered
        self._watch = StepsWatch(0)
        self._outer: set[Place] = set()
        self._batches = 0
        self._process_bytes = 0
        self._rates = Rates()
        self._waited = lambda: 0.0
        self._undo: list[_seam.Undo] = []
        # A log file has no width of its own; 80 columns would break the table.
        width = None if sys.stdout.isatty() else 118
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True, width=width)

    def __repr__(self) -> str:
        return (
            f"MemoryReport(measured_step={self.measured_step!r}, live={self.live!r}, path={self.path!r}, "
            f"loss_name={self.loss_name!r}, watched_steps={self.watched_steps!r}, least_bytes={self.least_bytes!r})"
        )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note what the process holds besides tensors, and time the waits for data."""
        self._give_back()
        self.anatomy, self.findings, self._batches = None, (), 0
        self._outer = places()
        self._watch = StepsWatch(self.watched_steps, self._outer)
        held = sum(t.untyped_storage().nbytes() for t in [*pl_module.parameters(), *pl_module.buffers()])
        self._process_bytes = max(0, process_bytes() - held)
        self._waited, undo = _seam.time_data_waits(trainer)
        self._undo.append(undo)
        self._rates = Rates()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Enter the meter for the measured step, and the watch for leaks in the first ones."""
        self._watch.enter(_budget(trainer), self._batches)
        if self.anatomy is not None or self._batches != self.measured_step or self._meter is not None:
            return
        self._meter = TemporariesMeter(least_bytes=parse_bytes(self.least_bytes), outer=self._outer)
        self._meter.track([*pl_module.parameters(), *pl_module.buffers()], "weights")
        for optimizer in trainer.optimizers:
            states = states_on(trainer.strategy.root_device, optimizer)
            self._meter.track(states, "optimizer_states")
        self._meter.track(_gradients(pl_module), "gradients")
        self._meter.track(tensors_of(batch), "inputs")
        # Else torch would leave compiled code that it meets under a meter uncompiled for good.
        self._stance = torch.compiler.set_stance("force_eager")
        self._meter.__enter__()
        self._meter.phase = "forward"

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """The forward of a part ends."""
        if self._meter is not None:
            self._meter.end_forward()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The backward of a part ends; another part's forward may follow."""
        if self._meter is not None:
            self._meter.track(_gradients(pl_module), "gradients")
            self._meter.phase = "forward"

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """The optimizer's step begins."""
        if self._meter is not None:
            self._meter.phase = "optimizer"

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Leave the meter and the watch; log and print the live line."""
        self._leave_meter(trainer, pl_module)
        self._watch.leave()
        if self._watch.is_complete:
            self._judge(trainer, pl_module)
        self._batches += 1
        self._rates.count(batch)
        every: int = vars(trainer)["log_every_n_steps"]
        if self._batches % every:
            return
        values = self._rates.take(self._waited())
        budget = _budget(trainer)
        if self.anatomy is not None:
            values["memory_gib"] = max(self.anatomy.peak_bytes, _peak_seen(budget)) / 2**30
        # Through the loggers themselves: a callback's self.log would count as the user's metric.
        for logger in trainer.loggers:
            logger.log_metrics(
                {f"memkit/{name}": value for name, value in values.items()}, trainer.global_step
            )
        if self.live:
            self._print_line(trainer, self._loss(trainer, outputs), values, budget)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print what validation has logged: the values whose names begin with "val"."""
        found = {
            name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val")
        }
        if self.live and found and not trainer.sanity_checking:
            self._print_values(trainer, found)
        self._rates.restart(self._waited())

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A batch whose start ended the epoch was not stepped."""
        self._drop_meter()
        self._watch.drop()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the table and the findings, and write the JSON."""
        self._drop_meter()
        self._judge(trainer, pl_module)
        device = trainer.strategy.root_device
        torn = fragmentation(torch.cuda.memory_stats(device)) if device.type == "cuda" else None
        self.findings += (torn,) if torn is not None else ()
        # Asked on every rank: a logger's folder is broadcast from the first.
        folder = Path(trainer.log_dir or trainer.default_root_dir)
        if self.anatomy is not None:
            self.anatomy = replace(self.anatomy, findings=self.findings)
            self._print_table(trainer, self.anatomy, Path(self.path or folder / "memory_report.json"))
        experts = expert_bytes(pl_module)
        self._print_lines(self.findings if experts is None else (*self.findings, experts))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Lightning calls no teardown after an error."""
        self._give_back()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the profiler's hooks back."""
        self._give_back()

    def _give_back(self) -> None:
        self._drop_meter()
        self._watch.drop()
        while self._undo:
            self._undo.pop()()

    def _drop_meter(self) -> None:
        """A step that failed or was skipped must not leave its meter active."""
        if self._meter is not None:
            self._exit(self._meter)
            self._meter = None

    def _exit(self, meter: TemporariesMeter) -> None:
        meter.__exit__(None, None, None)
        if self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None

    def _leave_meter(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._meter is None:
            return
        meter, self._meter = self._meter, None
        self._exit(meter)
        device = trainer.strategy.root_device
        states = [state for optimizer in trainer.optimizers for state in states_on(device, optimizer)]
        self.anatomy = meter.dissect(
            gradients=_gradients(pl_module),
            optimizer_states=states,
            fixed_bytes=fixed_bytes(device) if device.type == "cuda" else self._process_bytes,
        )
        self.findings += tuple(meter.findings())
        meter.forget()

    def _judge(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Name what the watched steps have left behind; said at once, since it grows."""
        found = self._watch.findings(trainer, pl_module)
        self.findings += found
        if self.live:
            self._print_lines(found)

    @rank_zero_only
    def _print_lines(self, lines: Sequence[Finding | ExpertBytes]) -> None:
        for line in lines:
            self._console.print(f"memory report: {line}", markup=False)

    def _loss(self, trainer: Trainer, outputs: Any) -> float | None:
        value = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if self.loss_name is not None:
            value = trainer.callback_metrics.get(self.loss_name)
        return float(value) * trainer.accumulate_grad_batches if isinstance(value, Tensor) else None

    @rank_zero_only
    def _print_line(
        self, trainer: Trainer, loss: float | None, values: dict[str, float], budget: MemoryBudget | None
    ) -> None:
        total = trainer.max_steps if trainer.max_steps > 0 else trainer.estimated_stepping_batches
        cells = [f"step {trainer.global_step}/{total}"]
        if loss is not None:
            cells.append(f"loss {loss:.4f}")
        for name in ("tokens_per_second", "samples_per_second"):
            if name in values:
                cells.append(f"{values[name]:,.0f} {name.split('_')[0]}/s")
        if "memory_gib" in values:
            used = format_bytes(values["memory_gib"] * 2**30)
            cells.append(f"memory {used}" + (f" of {format_bytes(budget.budget_bytes)}" if budget else ""))
        if "real_tokens" in values:
            cells.append(f"real tokens {values['real_tokens']:.1%}")
        cells.append(f"loader stall {values['loader_stall']:.1%}")
        self._console.print(" | ".join(cells))

    @rank_zero_only
    def _print_values(self, trainer: Trainer, values: dict[str, float]) -> None:
        cells = [f"{name} {value:.4f}" for name, value in values.items()]
        self._console.print(" | ".join([f"step {trainer.global_step} validation", *cells]))

    @rank_zero_only
    def _print_table(self, trainer: Trainer, anatomy: Anatomy, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        anatomy.to_json(path)
        self._console.print(anatomy_table(anatomy, _budget(trainer)))
        self._console.print(f"memory report: {path}")
        budget = _budget(trainer)
        if budget is not None and anatomy.peak_bytes > budget.budget_bytes:
            over = format_bytes(anatomy.peak_bytes - budget.budget_bytes)
            warnings.warn(
                f"The metered step's peak is {over} over the budget {budget.budget!r}.", stacklevel=2
            )


def _budget(trainer: Trainer) -> MemoryBudget | None:
    found = [callback for callback in trainer.callbacks if isinstance(callback, MemoryBudget)]  # pyright: ignore
    return found[0] if found else None


def _peak_seen(budget: MemoryBudget | None) -> int:
    return budget.peak_bytes if budget is not None else 0


def _gradients(module: LightningModule) -> list[Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]
