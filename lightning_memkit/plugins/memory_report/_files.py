"""Print and write a report when training ends or fails."""

import warnings
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_memkit.memory.page import page
from lightning_memkit.memory.report import StepReport
from lightning_memkit.memory.report_table import last_screen
from lightning_memkit.memory.units import format_bytes
from lightning_memkit.plugins.asked import budget_of
from lightning_memkit.plugins.cli.report_command import FAILED, REPORT
from lightning_memkit.plugins.memory_report._artifacts import store
from lightning_memkit.plugins.memory_report._line import Printer
from lightning_memkit.plugins.memory_report._snapshot import dump
from lightning_memkit.utilities.atomic_write import write_whole


class ReportFiles:
    """Prints a report on the first rank, writes it to the folder of the run's logs, and to loggers that store files.

    Args:
        trainer: the trainer of the run.
        path: the user's path of the JSON file; None for one in the folder of logs.
        printer: prints the tables.
    """

    def __init__(self, trainer: Trainer, path: str | None, printer: Printer) -> None:
        self._trainer = trainer
        # Read log_dir on every rank when training starts: a logger's folder is broadcast from the first rank.
        folder = Path(trainer.log_dir or trainer.default_root_dir)
        self._path = Path(path) if path is not None else folder / REPORT
        self._printer = printer

    @rank_zero_only
    def write(self, report: StepReport) -> None:
        """Print what a run ends with, and write JSON and page."""
        self._write(report, self._path)
        for what in last_screen(report):
            self._printer.show(self._trainer, what)
        rest = f"memkit report {_short(self._path)} (tables, page)"
        self._printer.show(self._trainer, f"memory report: {rest}")
        budget, peak = budget_of(self._trainer), report.anatomy.peak_bytes
        if budget is not None and peak > budget.budget_bytes:
            over = format_bytes(peak - budget.budget_bytes)
            warnings.warn(
                f"The metered step's peak is {over} over the budget {budget.budget!r}.", stacklevel=2
            )

    def write_failed(self, report: StepReport) -> None:
        """Write JSON, page and allocator snapshot of a step that ran out of memory, on the rank that did."""
        rank = self._trainer.global_rank
        path = self._path.with_name(FAILED)
        path = path.with_stem(f"{path.stem}_rank{rank}") if rank else path
        self._write(report, path)
        dump(self._trainer.strategy.root_device, path.with_name(f"{path.stem}_snapshot.pickle"))
        self._printer.show(
            self._trainer,
            f"memory report: what lived when step {report.run.step} failed: {path.with_suffix('.html')}",
        )

    @rank_zero_only
    def write_snapshot(self) -> None:
        """Write torch's snapshot of CUDA's allocator in the metered step, while that is recorded."""
        device = self._trainer.strategy.root_device
        if device.type == "cuda":
            self._path.parent.mkdir(parents=True, exist_ok=True)
            dump(device, self._path.with_name(f"{self._path.stem}_snapshot.pickle"))

    def _write(self, report: StepReport, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        report.to_json(path)
        write_whole(path.with_suffix(".html"), page(report))
        store(self._trainer, (path, path.with_suffix(".html")))


def _short(path: Path) -> Path:
    """The path from where one stands, if it is below; the folder stands for the report in it."""
    path = path.parent if path.name == REPORT else path
    here = Path.cwd()
    return path.absolute().relative_to(here) if path.absolute().is_relative_to(here) else path
