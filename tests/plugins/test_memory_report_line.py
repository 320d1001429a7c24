"""The line while training: beside progress bars and in them, to every logger, and its operations by torch's count."""

import io
import logging
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from lightning_memkit import MemoryBudget, MemoryReport
from lightning_memkit.memory.units import format_bytes
from lightning_memkit.plugins.memory_report import callback
from lightning_memkit.plugins.memory_report._line import in_bar, line
from lightning_memkit.plugins.memory_report._rates import Rates, ideal_seconds, named_device
from lightning_memkit.prediction.devices import DEVICES, Device
from lightning_memkit.testing import fail_at
from tests.plugins.toys import ShardableTagger, TokenTagger, loader, tagged_rows, trained

GIB = 2**30
LINE = re.compile(r"step \d+/\d+ \| loss [\d.]+ \| .*loader stall [\d.]+%( \| retries \d+)?")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report is written where one stands."""
    monkeypatch.chdir(tmp_path)


def as_on_screen(text: str) -> list[str]:
    """The lines that a terminal ends up with: what is returned over or erased is gone."""
    rows, row, column = [""], 0, 0
    for piece in re.findall(r"\x1b\[[0-9;?]*[a-zA-Z]|.", text, re.DOTALL):
        if piece == "\n":
            row, column = row + 1, 0
            rows += [""] * (row + 1 - len(rows))
        elif piece == "\r":
            column = 0
        elif piece.startswith("\x1b"):
            number = int(re.sub(r"\D", "", piece) or 1)
            if piece[-1] == "A":
                row = max(0, row - number)
            elif piece[-1] == "K":
                rows[row] = ""
        else:
            rows[row] = rows[row][:column].ljust(column) + piece + rows[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in rows]


@pytest.mark.parametrize("kind", ["tqdm", "rich", "none"])
@pytest.mark.long
def test_lines_stand_whole_beside_a_progress_bar_that_shows_the_peak(kind: str, capsys: Any) -> None:
    terminal = io.StringIO()
    rich = RichProgressBar(console_kwargs={"file": terminal, "force_terminal": True, "width": 200})
    bars: dict[str, list[Callback]] = {"tqdm": [TQDMProgressBar()], "rich": [rich], "none": []}
    report = MemoryReport()
    trained(report, *bars[kind], max_steps=6, log_every_n_steps=2, enable_progress_bar=kind != "none")
    text = terminal.getvalue() + capsys.readouterr().out
    lines = [line for line in as_on_screen(text) if "loader stall" in line]
    assert report.anatomy is not None
    peak, shown = format_bytes(report.anatomy.peak_bytes), re.search(r"peak[:=]\s*([\d.]+)KiB", text)
    assert (shown is None) == (kind == "none")
    if shown is not None:
        assert f"{shown[1]} KiB" == peak
    if (
        kind == "rich"
    ):  # the only one that writes to a terminal here: its bar has the values, and no line repeats them
        assert lines == []
    else:
        assert len(lines) == 3
        assert all(map(LINE.fullmatch, lines)), lines
        assert peak in "".join(lines)
    assert any(line.startswith("Peak ") for line in as_on_screen(text))
    screen = as_on_screen(text)
    first, last = (
        next(i for i, line in enumerate(screen) if line.startswith(word)) for word in ("category", "all  ")
    )
    assert last > first + 1
    assert all(
        re.fullmatch(r"\w[\w ]+ {2,}[\d.]+ [KM]iB +[\d.]+%", line) for line in screen[first + 1 : last]
    )


def logged_beside(kind: str, watched: Callback, monkeypatch: Any) -> list[str]:
    """What a terminal ends up with, on which Lightning logs beside its bar; the log's handler is as it was."""
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    handler, logger = logging.StreamHandler(terminal), logging.getLogger("lightning.pytorch")
    monkeypatch.setattr(logger, "handlers", [handler])
    rich = RichProgressBar(console_kwargs={"file": terminal, "force_terminal": True, "width": 200})
    bar: Callback = rich if kind == "rich" else TQDMProgressBar()
    trained(watched, bar, max_steps=2, enable_progress_bar=True)
    assert logger.handlers == [handler]
    assert handler.stream is terminal
    return as_on_screen(terminal.getvalue())


@pytest.mark.parametrize("kind", ["tqdm", "rich"])
def test_a_line_of_the_log_stands_above_the_bar(kind: str, capsys: Any, monkeypatch: Any) -> None:
    screen = logged_beside(kind, MemoryBudget("260KiB"), monkeypatch)
    (said,) = [row for row in screen if "MemoryBudget: micro-batch" in row]
    assert said.startswith("MemoryBudget: micro-batch")


@pytest.mark.parametrize("kind", ["tqdm", "rich"])
def test_what_lightning_logs_stands_above_its_bar_too(kind: str, capsys: Any, monkeypatch: Any) -> None:
    screen = logged_beside(kind, MemoryReport(), monkeypatch)
    assert "`Trainer.fit` stopped: `max_steps=2` reached." in screen


PEAK = "peak 21.40 GiB of 22.00 GiB"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_of_tqdm_on_a_terminal_repeats_no_line(monkeypatch: Any) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    trained(MemoryReport(), TQDMProgressBar(), max_steps=4, log_every_n_steps=2, enable_progress_bar=True)
    assert "loader stall" not in terminal.getvalue()
    assert "samples/s=" in terminal.getvalue()
    screen = as_on_screen(terminal.getvalue())
    assert any(row.startswith("Peak ") for row in screen)


def test_a_bar_of_tqdm_in_a_notebook_repeats_no_line(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(
        "lightning_memkit.plugins.seams.bars.Console", lambda: SimpleNamespace(is_jupyter=True)
    )
    trained(MemoryReport(), TQDMProgressBar(), max_steps=4, log_every_n_steps=2, enable_progress_bar=True)
    printed = capsys.readouterr().out
    assert "loader stall" not in printed
    assert "samples/s=" in printed
    assert printed.count("Peak ") == 1


def test_in_a_file_each_interval_is_a_line_of_its_own(capsys: Any) -> None:
    trained(MemoryReport(), TQDMProgressBar(), max_steps=4, log_every_n_steps=2, enable_progress_bar=True)
    rows = capsys.readouterr().out.split("\n")
    assert len([row for row in rows if row.startswith("step ")]) == 2
    assert len([row for row in rows if row.startswith("Peak ")]) == 1


VALUES = {
    "tokens_per_second": 51204.0, "mfu": 0.382, "memory_gib": 9.81, "peak_gib": 21.4, "budget_gib": 22.0,
    "real_tokens": 0.979, "loader_stall": 0.002,
}  # fmt: skip


@pytest.mark.parametrize(
    ("width", "retries", "words"),
    [
        (
            math.inf,
            0,
            f"MFU 38.2% | memory 9.81 GiB, {PEAK} | real tokens 97.9% | loader stall 0.2% | retries 0",
        ),
        (150, 0, f"MFU 38.2% | memory 9.81 GiB, {PEAK} | real tokens 97.9% | loader stall 0.2%"),
        (130, 0, f"MFU 38.2% | {PEAK} | real tokens 97.9% | loader stall 0.2%"),
        (120, 3, f"MFU 38.2% | {PEAK} | loader stall 0.2% | retries 3"),
        (80, 0, PEAK),
        (10, 3, f"{PEAK} | retries 3"),
    ],
)
def test_a_narrow_terminal_is_told_what_matters_most(width: float, retries: float, words: str) -> None:
    trainer: Any = SimpleNamespace(max_steps=500, global_step=40)
    found = line(trainer, 3.2184, {**VALUES, "retries": retries}, width)
    assert found == f"step 40/500 | loss 3.2184 | 51,204 tokens/s | {words}"
    assert width == 10 or len(found) <= width


@pytest.mark.parametrize(
    ("gib", "words"),
    [((0.5,), "512.0MiB"), ((21.44, 22.0), "21.44/22.00GiB"), ((0.5, 22.0), "512.0MiB/22.00GiB")],
)
def test_a_bar_breaks_no_value(gib: tuple[float, ...], words: str) -> None:
    shown = in_bar(dict(zip(("peak_gib", "budget_gib"), gib, strict=False)) | {"tokens_per_second": 51204.0})
    assert shown == {"peak": words, "tokens/s": "51,204"}


def test_the_bar_is_left_as_it_was() -> None:
    bar = TQDMProgressBar()
    trained(MemoryReport(live=False), bar, max_steps=2, enable_progress_bar=True)
    assert "get_metrics" not in vars(bar)


def last_logged(folder: Path) -> dict[str, float]:
    header, *rows = next(folder.rglob("metrics.csv")).read_text().splitlines()
    found = [dict(zip(header.split(","), row.split(","), strict=True)) for row in rows]
    return {
        name: float(value)
        for row in found
        for name, value in row.items()
        if name.startswith("memkit/") and value
    }


@pytest.mark.long
def test_every_logger_has_the_values_of_the_line(tmp_path: Path, capsys: Any) -> None:
    report, budget = MemoryReport(), MemoryBudget("260KiB", enforce="always")
    loggers = [CSVLogger(tmp_path / name) for name in ("one", "other")]
    trained(budget, report, max_steps=6, log_every_n_steps=3, logger=loggers)
    one, other = (last_logged(tmp_path / name) for name in ("one", "other"))
    assert one == other
    assert {"memkit/samples_per_second", "memkit/loader_stall", "memkit/model_tflops"} <= set(one)
    assert one["memkit/budget_gib"] * GIB == budget.budget_bytes
    assert report.anatomy is not None
    assert one["memkit/peak_gib"] * GIB == max(report.anatomy.peak_bytes, budget.peak_bytes)
    assert 0 < one["memkit/memory_gib"] <= one["memkit/peak_gib"]
    assert one["memkit/retries"] == 0
    assert "memkit/mfu" not in one  # a CPU's peak is not known
    printed = capsys.readouterr().out
    assert "of 260.0 KiB" in printed
    assert "retries 0" in printed


def test_retries_are_counted_in_the_line(capsys: Any) -> None:
    class Failing(TokenTagger):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            with fail_at(0, armed=batch_idx == 3 and len(batch["x"]) > 4):
                return super().training_step(batch, batch_idx)

    report = MemoryReport()
    budget = MemoryBudget("1GiB", micro_batch_size=8)
    trained(budget, report, module=Failing, max_steps=4, log_every_n_steps=4)
    assert budget.retries == 1
    assert "retries 1" in capsys.readouterr().out
    assert report.report is not None
    assert report.report.run.retries == 1


def plain_flops(module: TokenTagger, batch: dict[str, Tensor]) -> int:
    with FlopCounterMode(display=False) as counter:
        hidden = module.mix(module.embedding(batch["x"]))[0]
        F.cross_entropy(module.head(hidden.flatten(0, 1)), batch["labels"].flatten()).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("size", [8, 2])
def test_operations_are_a_whole_step_s_and_give_the_share_of_the_peak(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    sheet = Device(name="here", memory_bytes=2**33, flops_16=4e9, flops_32=1e9, bytes_per_second=1e9)
    monkeypatch.setattr(callback, "known_device", lambda device: sheet)
    report = MemoryReport()
    budget = MemoryBudget("1GiB", micro_batch_size=size)
    trained(
        budget, report, module=ShardableTagger, max_steps=4, log_every_n_steps=4, logger=CSVLogger(tmp_path)
    )
    assert report.report is not None
    found = report.report.flops
    batch = next(iter(loader()))
    expected = plain_flops(ShardableTagger(), batch)
    assert found.model == expected > 0
    assert (found.samples, found.tokens, found.again) == (8, 0, 0)
    logged = last_logged(tmp_path)
    rate = logged["memkit/samples_per_second"]
    assert logged["memkit/model_tflops"] == pytest.approx(rate * expected / 8 / 1e12)
    assert logged["memkit/mfu"] == pytest.approx(rate * expected / 8 / sheet.flops_32)
    assert "| MFU " in capsys.readouterr().out


def test_a_batch_of_an_accumulation_window_counts_for_itself(tmp_path: Path) -> None:
    report = MemoryReport(live=False)
    trained(report, module=ShardableTagger, max_steps=2, accumulate_grad_batches=4)
    assert report.report is not None
    assert report.report.flops.model == plain_flops(ShardableTagger(), next(iter(loader())))


def test_float32_as_tf32_has_no_known_peak() -> None:
    from lightning_memkit.memory.flops import StepFlops

    full, half = StepFlops(model=1000, samples=1), StepFlops(model=1000, samples=1, share_16_bit=1.0)
    sheet = DEVICES["h200"]
    before = torch.get_float32_matmul_precision()
    try:
        assert ideal_seconds(full, sheet) == pytest.approx(1000 / sheet.flops_32)
        torch.set_float32_matmul_precision("high")
        assert ideal_seconds(full, sheet) is None
        assert ideal_seconds(half, sheet) == pytest.approx(1000 / sheet.flops_16)
    finally:
        torch.set_float32_matmul_precision(before)
    assert ideal_seconds(half, None) is None


@pytest.mark.parametrize(
    ("name", "gib", "known"),
    [
        ("NVIDIA H200", 140, "h200"),
        ("NVIDIA H100 80GB HBM3", 80, "h100-80gb"),
        ("NVIDIA A100-PCIE-40GB", 40, "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", 80, "a100-80gb"),
        ("NVIDIA GeForce RTX 4090", 24, "rtx4090"),
        ("Tesla T4", 15, "t4"),
        ("NVIDIA H100 PCIe", 80, "h100pcie"),  # the same chip, at other rates
        ("NVIDIA GeForce RTX 4090 D", 24, "rtx4090d"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16, None),
        ("NVIDIA GeForce RTX 3090 Ti", 24, "rtx3090ti"),
        ("NVIDIA T400", 4, None),
        ("NVIDIA B200", 179, "b200"),
        ("AMD Instinct MI300X", 192, "mi300x"),
        ("AMD Instinct MI250X", 64, "mi250x"),
        ("AMD Instinct MI300A", 128, None),
    ],
)
def test_only_devices_whose_peak_is_known_have_a_share_of_it(name: str, gib: int, known: str | None) -> None:
    found = named_device(name, gib * GIB)
    assert (None if found is None else found.name) == known


class Language(TokenTagger):
    """Takes batches as transformers' collators make them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mix = nn.Embedding(50, 32), nn.Identity()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.head(self.embedding(batch["input_ids"]))
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def test_tokens_are_counted_in_batches_that_have_them(capsys: Any) -> None:
    rows = [{"input_ids": row["x"], "labels": row["labels"]} for row in tagged_rows(32)]
    masked = [{**row, "attention_mask": (torch.arange(12) < 9).long()} for row in rows]
    for data, real in ((rows, None), (masked, 0.75)):
        report = MemoryReport()
        batches: Any = DataLoader(data, batch_size=8)  # pyright: ignore[reportArgumentType]
        trained(report, module=Language, data=batches, max_steps=4, log_every_n_steps=4)
        assert report.report is not None
        flops, rates = report.report.flops, report.report.rates
        assert flops.tokens == 8 * 12
        assert rates.get("real_tokens") == real
        computed = rates["tokens_per_second"] / (real or 1)
        assert computed == pytest.approx(12 * rates["samples_per_second"])
        assert rates["model_tflops"] == pytest.approx(flops.model * computed / flops.tokens / 1e12)
        assert " tokens/s | " in capsys.readouterr().out


def test_a_batch_that_is_no_mapping_has_samples_only() -> None:
    rates = Rates()
    rates.count([torch.zeros(4, 3), torch.zeros(4)])
    rates.count(torch.zeros(4, 3))
    rates.count("text")
    assert set(rates.take(0.0)) == {"loader_stall", "samples_per_second"}
