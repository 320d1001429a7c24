"""The live line of a report: printed above a progress bar, summarised in it, and sent to the loggers."""

import sys
from collections.abc import Iterator
from io import StringIO
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from rich.console import Console, RenderableType
from torch import Tensor

from lightning_memkit.memory.units import format_bytes
from lightning_memkit.plugins.seams.bars import is_live, is_shown
from lightning_memkit.utilities.patching import Undo

_WIDTH = 118  # of output to a file; rich's default of 80 columns would break the table
# What a narrow terminal does without, in this order; retries only if there are none.
_NEEDED_LEAST = ("retries", "memory_gib", "real_tokens", "loader_stall", "mfu")


class Printer:
    """Prints through the progress bar on the screen, which printing past it would garble.

    Standard output is looked up for each line: it may be redirected later, and a copy may be in another
    process.
    """

    @rank_zero_only
    def show(self, trainer: Trainer, what: RenderableType) -> None:
        """Print a line, or a table."""
        bar: Any = trainer.progress_bar_callback
        if is_live(bar):
            progress: Any = bar.progress
            progress.console.print(what, markup=False, highlight=False, soft_wrap=True)
            return
        is_tqdm = isinstance(bar, TQDMProgressBar) and bar.is_enabled
        if is_tqdm and sys.stdout.isatty():
            Tqdm.write(self._text(what), file=sys.stdout, end="")
            return
        if is_tqdm and not is_shown(bar):  # in a file, whose last line is the bar's, without an end
            sys.stdout.write("\n")
        _console().print(what, markup=False)

    def show_step(self, trainer: Trainer, loss: float | None, values: dict[str, float]) -> None:
        """Print the live line, where no progress bar shows its values."""
        if not is_shown(trainer.progress_bar_callback):
            width = _console().width if sys.stdout.isatty() else float("inf")
            self.show(trainer, line(trainer, loss, values, width))

    def _text(self, what: RenderableType) -> str:
        plain = Console(file=StringIO(), highlight=False, soft_wrap=True, width=_console().width)
        with plain.capture() as captured:
            plain.print(what, markup=False)
        return captured.get()


def _console() -> Console:
    width = None if sys.stdout.isatty() else _WIDTH
    return Console(file=sys.stdout, highlight=False, soft_wrap=True, width=width)


def show_in_bar(trainer: Trainer, values: dict[str, str]) -> Undo:
    """Show these values, which may change, in the progress bar beside the module's own. Returns the undo."""
    bar = trainer.progress_bar_callback
    if not isinstance(bar, ProgressBar):
        return lambda: None
    stock = bar.get_metrics

    def get_metrics(trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        return {**stock(trainer, pl_module), **values}

    bar.get_metrics = get_metrics  # pyright: ignore[reportAttributeAccessIssue]

    def undo() -> None:
        vars(bar).pop("get_metrics", None)

    return undo


def to_loggers(trainer: Trainer, values: dict[str, float]) -> None:
    """Send values directly to all loggers: a callback's `self.log` would count as the user's metric."""
    named = {f"memkit/{name}": value for name, value in values.items()}
    for logger in trainer.loggers:
        logger.log_metrics(named, trainer.global_step)


def line(trainer: Trainer, loss: float | None, values: dict[str, float], width: float = float("inf")) -> str:
    """Loss, speed and memory in one line; in a narrow terminal without what is needed least."""
    total = trainer.max_steps if trainer.max_steps > 0 else trainer.estimated_stepping_batches
    first = [f"step {trainer.global_step}/{total}"]
    if loss is not None:
        first.append(f"loss {loss:.4f}")
    shown, dispensable = dict(values), list(_NEEDED_LEAST)
    if shown.get("retries"):
        dispensable.remove("retries")
    while len(found := " | ".join([*first, *_cells(shown)])) > width and dispensable:
        shown.pop(dispensable.pop(0), None)
    return found


def _cells(values: dict[str, float]) -> Iterator[str]:
    for name in ("tokens", "samples"):
        if f"{name}_per_second" in values:
            yield f"{values[f'{name}_per_second']:,.0f} {name}/s"
    if "mfu" in values:
        yield f"MFU {values['mfu']:.1%}"
    yield from _memory(values)
    if "real_tokens" in values:
        yield f"real tokens {values['real_tokens']:.1%}"
    if "loader_stall" in values:
        yield f"loader stall {values['loader_stall']:.1%}"
    if "retries" in values:
        yield f"retries {values['retries']:.0f}"


def in_bar(values: dict[str, float]) -> dict[str, str]:
    """The few values for which a progress bar has room, without blanks: Rich's breaks lines at them."""
    found: dict[str, str] = {}
    if "peak_gib" in values:
        peak, unit = format_bytes(values["peak_gib"] * 2**30).split()
        most, of = format_bytes(values.get("budget_gib", 0.0) * 2**30).split()
        budget = f"{'' if unit == of else unit}/{most}{of}" if "budget_gib" in values else unit
        found["peak"] = f"{peak}{budget}"
    rate = next((name for name in ("tokens", "samples") if f"{name}_per_second" in values), None)
    if rate is not None:
        found[f"{rate}/s"] = f"{values[f'{rate}_per_second']:,.0f}"
    if "mfu" in values:
        found["MFU"] = f"{values['mfu']:.1%}"
    return found


def _memory(values: dict[str, float]) -> list[str]:
    if "peak_gib" not in values:
        return []
    now = f"memory {format_bytes(values['memory_gib'] * 2**30)}, " if "memory_gib" in values else ""
    of = f" of {format_bytes(values['budget_gib'] * 2**30)}" if "budget_gib" in values else ""
    return [f"{now}peak {format_bytes(values['peak_gib'] * 2**30)}{of}"]


def loss_of(trainer: Trainer, outputs: Any, name: str | None) -> float | None:
    """The logged value of that name, or the result of `training_step`; None if it is no tensor."""
    value = outputs.get("loss") if isinstance(outputs, dict) else outputs
    if name is not None:
        value = trainer.callback_metrics.get(name)
    return float(value) * trainer.accumulate_grad_batches if isinstance(value, Tensor) else None


def validation_line(trainer: Trainer) -> str:
    """The logged values whose names begin with "val"; empty if there are none, and in a sanity check."""
    found = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val")}
    if not found or trainer.sanity_checking:
        return ""
    cells = [f"{name} {value:.4f}" for name, value in found.items()]
    return " | ".join([f"step {trainer.global_step} validation", *cells])
