"""Rows of predictions on a GPU: what its allocator hands out and reserves at most, beside what was predicted of each.

Llamas of 1 and 8 billion parameters, and the CPU's models at eight times the width in three precisions each. Both
figures of the allocator include the matrix library's workspaces, and so do both that are predicted. Predictions are
made ahead, in processes that use no GPU.
"""

import os
import re
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from typing import Any

import torch
from lightning.pytorch import Trainer

from benchmarks._gpu_device import emptied
from benchmarks._gpu_rows import GpuRow, Values, at_most
from benchmarks._gpu_size import GpuSize
from benchmarks._gpu_training import Repeated, StepClock, quiet
from benchmarks._prediction_cells import PRECISIONS, Batches, Cell, Trained, trainer_options
from benchmarks._prediction_models import subjects
from benchmarks.harness import Options
from benchmarks.prediction_ranks import SHAPES, Llama
from lightning_memkit import ActivationCheckpointing, Budget, PureBF16Precision, predict_memory
from lightning_memkit.initialization import build_on
from lightning_memkit.memory.allocator_trace import AllocatorTrace
from lightning_memkit.memory.units import format_bytes
from lightning_memkit.prediction.devices import Device
from lightning_memkit.prediction.result import Prediction

STEPS, MICRO_BATCH, IMAGES = 3, 4, 16
ALLOCATED_PCT, RESERVED_PCT = 2.0, 5.0
PREDICTORS = 6  # processes
OPTIMIZER = "AdamW foreach"


@dataclass(frozen=True, kw_only=True)
class GpuCase:
    """A Llama of a shape, and how it is trained."""

    shape: str
    precision: str
    policy: str
    micro_batch: int
    length: int = 2048

    @property
    def name(self) -> str:
        """How tables call it."""
        return f"Llama {self.shape}, {self.precision}, {self.policy}, micro-batch {self.micro_batch}"

    def trainer(self) -> dict[str, Any]:
        """The Trainer's arguments."""
        options: dict[str, Any] = {"precision": "bf16-mixed"} if self.precision == "mixed" else {}
        if self.precision == "kahan":
            options["plugins"] = [PureBF16Precision()]
        if self.policy != "none":
            options["callbacks"] = [ActivationCheckpointing(self.policy)]
        return options

    def batch(self) -> dict[str, torch.Tensor]:
        """Samples of `length` tokens."""
        words, generator = SHAPES[self.shape]["vocab_size"], torch.Generator().manual_seed(0)
        ids = torch.randint(0, words, (self.micro_batch, self.length), generator=generator)
        return {"input_ids": ids, "labels": ids.clone()}

    def predicted(self, device: Device | None) -> Prediction:
        """For a device; nothing runs on it."""
        build = partial(Llama, self.shape)
        return predict_memory(build, self.batch(), trainer=self.trainer(), device=device or "cpu")

    def fit(self, device: torch.device) -> None:
        """Some steps."""
        with build_on(device, torch.bfloat16 if self.precision == "kahan" else torch.float32):
            module = Llama(self.shape)
        _fit(self.trainer(), device).fit(module, Repeated(self.batch(), STEPS))  # pyright: ignore[reportArgumentType]


CASES = (
    GpuCase(shape="1b", precision="mixed", policy="none", micro_batch=1),
    GpuCase(shape="1b", precision="mixed", policy="full", micro_batch=4),
    GpuCase(shape="1b", precision="kahan", policy="none", micro_batch=4),
    GpuCase(shape="1b", precision="kahan", policy="selective", micro_batch=2),
    GpuCase(shape="8b", precision="kahan", policy="full", micro_batch=1),
)
TINY = (GpuCase(shape="tiny", precision="mixed", policy="full", micro_batch=2, length=32),)


def rows_of_predictions(options: Options) -> list[GpuRow]:
    """Large models first, then a row for each of the CPU's models."""
    size = GpuSize.of(options)
    rows = []
    for case in _cases(size):
        slug = _slug(f"{case.shape} {case.precision} {case.policy} {case.micro_batch}")
        run = partial(large, case, f"llama_{slug}", options)
        needs = 40 if not rows or case.shape == "8b" else 16  # the first waits for processes that predict
        rows.append(
            GpuRow(what=case.name, needs_seconds=needs, run=run, limits=_limits(size, f"llama_{slug}"))
        )
    for cells in _cells(size):
        name = cells[0].subject.name
        run = partial(small, cells, _slug(name), options)
        rows.append(GpuRow(what=name, needs_seconds=3, run=run, limits=_limits(size, _slug(name))))
    return rows


def large(case: GpuCase, slug: str, options: Options) -> Values:
    """One Llama."""
    said = foreseen(options)[case.name].result()
    return _beside({"": (said, peaks(case.fit, torch.device(options.device)))}, slug)


def small(cells: list[Cell], slug: str, options: Options) -> Values:
    """One model in all precisions: the worst of the errors."""
    device, pairs = torch.device(options.device), {}
    for cell in cells:
        said = foreseen(options)[_name(cell)].result()
        pairs[cell.precision] = said, peaks(partial(_fit_cell, cell), device)
    return _beside(pairs, slug)


def peaks(fit: Callable[[torch.device], None], device: torch.device) -> dict[str, int]:
    """The allocator's peaks in a training, above what other rows have left; tensors' on the CPU."""
    if device.type != "cuda":
        with AllocatorTrace() as trace:
            fit(device)
        return {"allocated": trace.peak_bytes}
    left = emptied(device), torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    fit(device)
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"allocated": allocated - left[0], "reserved": reserved - left[1]}


def _beside(pairs: dict[str, tuple[Prediction, dict[str, int]]], slug: str) -> Values:
    """The worst error of each figure of the allocator, and the bytes as text."""
    worst: dict[str, float] = {}
    texts: Values = {}
    for name, (prediction, measured) in pairs.items():
        said = _said(prediction)
        for what, bytes_ in measured.items():
            error = 100 * abs(said[what] / bytes_ - 1)
            worst[what] = max(worst.get(what, 0.0), error)
            texts[f"{name} {what}".strip()] = f"{format_bytes(said[what])} said, {format_bytes(bytes_)} taken"
    return {**{f"{slug}_{what}_error_pct": error for what, error in worst.items()}, **texts}


def _said(prediction: Prediction) -> dict[str, int]:
    """What is predicted of each figure of the allocator, with the segments that it is set to use."""
    settings = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    expandable = "expandable_segments:True" in settings
    return {
        "allocated": prediction.allocated_bytes or prediction.peak_bytes,
        "reserved": prediction.expandable_bytes if expandable else prediction.reserved_bytes,
    }


@cache
def foreseen(options: Options) -> dict[str, "Future[Prediction]"]:
    """Predictions of all rows by name, under way in processes of their own from the first call on."""
    size = GpuSize.of(options)
    device = Budget("auto", "auto").target() if options.device == "cuda" else None
    pool = ProcessPoolExecutor(1 if size.is_tiny else PREDICTORS, mp_context=get_context("spawn"))
    asked: dict[str, Callable[[Device | None], Prediction]] = {c.name: c.predicted for c in _cases(size)}
    asked |= {_name(cell): partial(_predicted_cell, cell) for cells in _cells(size) for cell in cells}
    return {name: pool.submit(predict, device) for name, predict in asked.items()}


def _predicted_cell(cell: Cell, device: Device | None) -> Prediction:
    torch.manual_seed(0)
    batch = cell.subject.batch(cell.micro_batch)
    return predict_memory(Trained(cell), batch, trainer=trainer_options(cell), device=device or "cpu")


def _fit_cell(cell: Cell, device: torch.device) -> None:
    torch.manual_seed(0)
    _fit(trainer_options(cell), device).fit(Trained(cell), Batches(cell))  # pyright: ignore[reportArgumentType]


def _fit(chosen: dict[str, Any], device: torch.device) -> Trainer:
    callbacks = [*chosen.pop("callbacks", []), *([StepClock()] if device.type == "cuda" else [])]
    return Trainer(**quiet(device), **chosen, callbacks=callbacks, max_steps=STEPS)


def _cases(size: GpuSize) -> list[GpuCase]:
    return [case for case in (TINY if size.is_tiny else CASES) if case.shape in size.llamas]


def _cells(size: GpuSize) -> list[list[Cell]]:
    """Of each model one cell a precision."""
    chosen = list(subjects(size.model_scale))[: size.models]
    return [
        [
            Cell(
                subject=subject,
                precision=precision,
                optimizer=OPTIMIZER,
                policy="none",
                micro_batch=IMAGES if _reads_images(subject.name) else MICRO_BATCH,
            )
            for precision in PRECISIONS
        ]
        for subject in chosen
    ]


def _reads_images(name: str) -> bool:
    return name.endswith(("ImageClassification", "CNN"))


def _limits(size: GpuSize, slug: str) -> Any:
    limits = {"allocated": ALLOCATED_PCT, "reserved": RESERVED_PCT}
    return size.limits({f"{slug}_{name}_error_pct": at_most(most) for name, most in limits.items()})


def _name(cell: Cell) -> str:
    return f"{cell.subject.name}, {cell.precision}"


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
