"""Run by test_forecasts.py in a process of its own: CUDA is in use, no backward has run, so that forks can predict."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from lightning_memkit import MemoryBudget, MemoryReport
from lightning_memkit.plugins.memory_budget import _forecast, callback
from lightning_memkit.plugins.planning import _given_run, prediction
from lightning_memkit.prediction.contained import contained
from tests.gpu.card import accelerator, sized
from tests.gpu.models import Language, batches, small
from tests.gpu.runs import fit
from tests.gpu.test_predictions import predicted

ROWS = 16
ENDED = "ended"
forks: list[str] = []


def noted(work: Callable[[], Any], **options: Any) -> Any:
    """`contained`, and how each fork of it ended."""
    try:
        result = contained(work, **options)
    except Exception as error:
        forks.append(f"{type(error).__name__}: {error}"[:500])
        raise
    forks.append(ENDED)
    return result


def used(device: torch.device) -> None:
    """Initialised, with memory, a kernel and random numbers; but autograd's threads for it don't run."""
    weight = torch.randn(8, 8, device=device)
    assert float((weight @ weight).sum().isfinite())


def by_function() -> dict[str, Any]:
    """What `predict_memory` says, twice."""
    return {"predicted": [predicted().peak_bytes for _ in range(2)]}


def by_report() -> dict[str, Any]:
    """What a report foresees of its first batch, and what it measures."""
    report = MemoryReport(live=False, watched_steps=0, predict=True)
    fit(report, module=Language(small), data=batches(4, ROWS, sized(512, 64)))
    assert report.report is not None
    foretold = report.report.predicted
    assert foretold is not None
    return {
        "what": foretold.what,
        "predicted": foretold.peak_bytes,
        "measured": report.report.anatomy.peak_bytes,
    }


def by_budget() -> dict[str, Any]:
    """The peak that a budget foresees of the size it chooses, and the one of its trial."""
    found: list[Any] = []

    def foreseen(*args: Any) -> Any:
        found.append(_forecast.foreseen(*args))
        return found[-1]

    _forecast.PAYS_FROM_PARAMETERS = 0  # small models are predicted, too
    callback.foreseen = foreseen
    budget = MemoryBudget(sized(3 << 29, 8 << 20))
    fit(budget, module=Language(small), data=batches(4, ROWS, sized(512, 64)))
    assert budget.sizing is not None
    foretold = found[0].peaks[budget.sizing.micro_batch_size] if found and found[0] else 0
    return {"what": "", "predicted": foretold, "measured": budget.sizing.peak_bytes}


WAYS = {"predict_memory": by_function, "report": by_report, "budget": by_budget}


def main(way: str, folder: str) -> None:
    modules: tuple[Any, ...] = (_given_run, prediction)
    used(torch.device(accelerator()))
    os.chdir(folder)  # reports are written where one stands
    for module in modules:
        module.contained = noted
    print(json.dumps({**WAYS[way](), "forks": forks}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
