"""Show where every byte of a training step went, and how the run goes, in the field's terms."""

import sys
import warnings
from pathlib import Path
from time import perf_counter
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.optim import Optimizer

from lightning_memkit.memory.anatomy import CATEGORIES, Anatomy, AnatomyMeter
from lightning_memkit.memory.measure import fixed_bytes, process_bytes
from lightning_memkit.memory.units import format_bytes
from lightning_memkit.micro_batching import SplitError, batch_size
from lightning_memkit.plugins import _seam
from lightning_memkit.plugins._trials import states_on, tensors_of
from lightning_memkit.plugins.memory_budget import MemoryBudget


class MemoryReport(Callback):
    """Prints a live line while training and at the end a table of the peak by category; one metered step.

    The live line has loss, tokens (or samples) a second, memory and budget, the share of real tokens, and the share
    of time spent waiting for the loader; the same values go to the loggers. One step is metered operator by
    operator (tens of microseconds each); its anatomy is printed when training ends and written as JSON.

    Args:
        measured_step: the training batch that is metered, counted from 0; the second one by default, when the
            optimizer's state exists.
        live: print the line every `trainer.log_every_n_steps` batches.
        path: the JSON file; by default `memory_report.json` in the logger's folder, or the trainer's.
        loss_name: the logged value that the line shows; by default what `training_step` returns.
    """

    def __init__(
        self,
        measured_step: int = 1,
        live: bool = True,
        path: str | None = None,
        loss_name: str | None = None,
    ) -> None:
        if measured_step < 0:
            raise ValueError(f"measured_step={measured_step} is negative; batches are counted from 0.")
        self.measured_step = measured_step
        self.live = live
        self.path = path
        self.loss_name = loss_name
        self.anatomy: Anatomy | None = None
        self._meter: AnatomyMeter | None = None
        self._batches = 0
        self._process_bytes = 0
        self._rates = _Rates()
        self._waited = lambda: 0.0
        self._undo: list[_seam.Undo] = []
        # A log file has no width of its own; 80 columns would break the table.
        width = None if sys.stdout.isatty() else 118
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True, width=width)

    def __repr__(self) -> str:
        return (
            f"MemoryReport(measured_step={self.measured_step!r}, live={self.live!r}, path={self.path!r}, "
            f"loss_name={self.loss_name!r})"
        )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note what the process holds besides tensors, and time the waits for data."""
        self._give_back()
        self.anatomy, self._batches = None, 0
        held = sum(t.untyped_storage().nbytes() for t in [*pl_module.parameters(), *pl_module.buffers()])
        self._process_bytes = max(0, process_bytes() - held)
        self._waited, undo = _seam.time_data_waits(trainer)
        self._undo.append(undo)
        self._rates = _Rates()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Enter the meter for the measured step."""
        if self.anatomy is not None or self._batches != self.measured_step or self._meter is not None:
            return
        self._meter = AnatomyMeter()
        self._meter.track([*pl_module.parameters(), *pl_module.buffers()], "weights")
        for optimizer in trainer.optimizers:
            states = states_on(trainer.strategy.root_device, optimizer)
            self._meter.track(states, "optimizer_states")
        self._meter.track(_gradients(pl_module), "gradients")
        self._meter.track(tensors_of(batch), "inputs")
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
        """Leave the meter; log and print the live line."""
        self._leave_meter(trainer, pl_module)
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

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the table and write the JSON."""
        self._drop_meter()
        # Asked on every rank: a logger's folder is broadcast from the first.
        folder = Path(trainer.log_dir or trainer.default_root_dir)
        if self.anatomy is not None:
            self._print_table(trainer, self.anatomy, Path(self.path or folder / "memory_report.json"))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Lightning calls no teardown after an error."""
        self._give_back()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the profiler's hooks back."""
        self._give_back()

    def _give_back(self) -> None:
        self._drop_meter()
        while self._undo:
            self._undo.pop()()

    def _drop_meter(self) -> None:
        """A step that failed or was skipped must not leave its meter active."""
        if self._meter is not None:
            self._meter.__exit__(None, None, None)
            self._meter = None

    def _leave_meter(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._meter is None:
            return
        meter, self._meter = self._meter, None
        meter.__exit__(None, None, None)
        device = trainer.strategy.root_device
        states = [state for optimizer in trainer.optimizers for state in states_on(device, optimizer)]
        self.anatomy = meter.dissect(
            gradients=_gradients(pl_module),
            optimizer_states=states,
            fixed_bytes=fixed_bytes(device) if device.type == "cuda" else self._process_bytes,
        )
        meter.forget()

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


class _Rates:
    """Tokens or samples a second, real tokens and loader stall since the last line."""

    def __init__(self) -> None:
        self._since, self._waited_before = perf_counter(), 0.0
        self._tokens = self._real = self._samples = 0

    def count(self, batch: Any) -> None:
        real = getattr(batch, "real_tokens", None)
        if real is not None:
            self._real += int(real)
            self._tokens += batch["input_ids"].numel()
            return
        try:
            self._samples += batch_size(batch)
        except SplitError:
            self._samples += 1

    def take(self, waited: float) -> dict[str, float]:
        now = perf_counter()
        seconds = max(now - self._since, 1e-9)
        values = {"loader_stall": min(1.0, (waited - self._waited_before) / seconds)}
        if self._tokens:
            values["tokens_per_second"] = self._real / seconds
            values["real_tokens"] = self._real / self._tokens
        if self._samples:
            values["samples_per_second"] = self._samples / seconds
        self.restart(waited, now)
        return values

    def restart(self, waited: float, now: float | None = None) -> None:
        """Count anew from here; what came in between is not training."""
        self._since, self._waited_before = perf_counter() if now is None else now, waited
        self._tokens = self._real = self._samples = 0


def anatomy_table(anatomy: Anatomy, budget: MemoryBudget | None = None) -> Table:
    """The anatomy as a table: each category at the peak, and at its own largest."""
    title = f"Peak {format_bytes(anatomy.peak_bytes)} in the {anatomy.peak_phase}"
    if budget is not None:
        title += f", budget {format_bytes(budget.budget_bytes)}"
        if budget.sizing is not None:
            title += f", micro-batch {budget.sizing.micro_batch_size}"
    table = Table(title=title, title_justify="left", caption=_caption(anatomy), caption_justify="left")
    table.add_column("category")
    table.add_column("at the peak", justify="right")
    table.add_column("share", justify="right")
    table.add_column("at its largest", justify="right")
    table.add_column("what it is")
    for category, meaning in CATEGORIES.items():
        if not anatomy.largest.get(category):
            continue
        table.add_row(
            category.replace("_", " "),
            format_bytes(anatomy.at_peak[category]),
            f"{anatomy.at_peak[category] / max(1, anatomy.peak_bytes):.1%}",
            format_bytes(anatomy.largest[category]),
            meaning,
        )
    fixed = "context, other processes and the process itself: outside the budget"
    table.add_row(
        "fixed cost", format_bytes(anatomy.fixed_bytes), "", format_bytes(anatomy.fixed_bytes), fixed
    )
    return table


def _caption(anatomy: Anatomy) -> str:
    return f"peak at {anatomy.peak_operator}; one step of {anatomy.operators:,} operators was metered"


def _budget(trainer: Trainer) -> MemoryBudget | None:
    found = [callback for callback in trainer.callbacks if isinstance(callback, MemoryBudget)]  # pyright: ignore
    return found[0] if found else None


def _peak_seen(budget: MemoryBudget | None) -> int:
    return budget.peak_bytes if budget is not None else 0


def _gradients(module: LightningModule) -> list[Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]
