"""A process of `start_up`: one model under plain Lightning and under the plugins, in turns."""

import json
import logging
import sys
import tempfile
import time
import warnings
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

import lightning_memkit
from benchmarks._budget_models import Case, cases
from benchmarks.harness import keep_freed_memory
from lightning_memkit import MemoryBudget, MemoryReport

STEPS, ROOMY, OF_THE_PEAK = 24, "4GiB", 0.6
KINDS = ("whole", "parts", "report")


class _Clock(Callback):
    """When training began, and when each step ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_start(self, *_: Any) -> None:
        self.times.append(time.perf_counter())

    def on_train_batch_end(self, *_: Any) -> None:
        self.times.append(time.perf_counter())


def measured(index: int) -> dict[str, float]:
    """The seconds of a plain step, and what each kind adds to the first and to all steps."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning_memkit").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    keep_freed_memory()
    for name in lightning_memkit.__all__:
        getattr(lightning_memkit, name)
    case = cases()[index]
    _train(case)  # what Lightning and torch do once a process
    first, end, step = _train(case)
    found = {"step": step}
    budget = MemoryBudget(ROOMY)
    for kind in KINDS:
        if kind == "whole":
            callback: Callback = budget
        elif kind == "parts":
            callback = MemoryBudget(int(OF_THE_PEAK * budget.peak_bytes))
        else:
            callback = MemoryReport(live=False)
        ours = _train(case, callback)
        found |= {f"before_first_{kind}": ours[0] - first, f"of_24_{kind}": ours[1] - end}
    return found


def _train(case: Case, *callbacks: Callback) -> tuple[float, float, float]:
    """Seconds to the end of the first step and of the last, and of the median one."""
    torch.manual_seed(0)
    clock, module, loader = _Clock(), case.module(), case.loader(STEPS)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu", max_steps=STEPS, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[*callbacks, clock], default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(module, loader)
    steps = [after - before for before, after in zip(clock.times, clock.times[1:], strict=False)]
    return clock.times[1] - begin, clock.times[-1] - begin, median(steps[1:])


if __name__ == "__main__":
    print(json.dumps(measured(int(sys.argv[1]))))
