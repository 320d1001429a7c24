"""The engine trains in a plain torch loop, without Lightning: the unsplit batch's weights, also after an OOM."""

import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_memkit.micro_batching.engine import Engine, Record
from lightning_memkit.micro_batching.options import BudgetOptions
from lightning_memkit.micro_batching.run import Run, Step
from lightning_memkit.testing import Faults, count_allocations, fail_at

ROWS, BATCHES = 12, 6
RARE = torch.tensor([1.0, 9.0, 3.0], dtype=torch.float64)


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "x": torch.randn(ROWS, 5, generator=generator, dtype=torch.float64),
            "labels": torch.randint(-1, 3, (ROWS,), generator=generator),
        }
        for _ in range(BATCHES)
    ]


def parts() -> tuple[nn.Module, torch.optim.Optimizer, Callable[[Any], Tensor]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(net(batch["x"]), batch["labels"], RARE, ignore_index=-1)

    return net, torch.optim.AdamW(net.parameters(), 0.05), loss_of


def unsplit(window: int = 1) -> dict[str, Tensor]:
    """Whole batches; several of them as one where a step covers more than one."""
    net, optimizer, loss_of = parts()
    data = batches()
    for first in range(0, BATCHES, window):
        together = data[first : first + window]
        batch = {name: torch.cat([one[name] for one in together]) for name in together[0]}
        optimizer.zero_grad()
        loss_of(batch).backward()
        optimizer.step()
    return net.state_dict()


def by_engine(size: Any, window: int = 1, faults: Faults | None = None) -> tuple[dict[str, Tensor], Record]:
    """Batches through an engine; `faults` are on in the fourth."""
    net, optimizer, loss_of = parts()
    run, record = Run(net, [optimizer]), Record()
    run.loader_batch_size = ROWS
    options = BudgetOptions(
        budget_bytes=2**30,
        micro_batch_size=size,
        effective_batch_size=ROWS * window if window > 1 else None,
    )
    engine = Engine(run, options, record=record, resumed={})
    try:
        for index, batch in enumerate(batches()):
            starts, ends = index % window == 0, (index + 1) % window == 0
            step = Step(
                run,
                batch,
                loss_of,
                batch_idx=index,
                starts_window=starts,
                ends_window=ends,
            )
            engine.prepare(step)

            def optimize(step: Step = step, ends: bool = ends) -> dict[str, Any]:
                loss, _ = engine.run(step)
                if ends:
                    optimizer.step()
                return {"loss": loss}

            with faults if faults is not None and index == 3 else nullcontext(), engine.around(step):
                engine.drive(step, optimize)
            run.steps_taken += ends
    finally:
        engine.close()
    return net.state_dict(), record


def largest_difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    return max(float((left[name] - right[name]).abs().max()) for name in left)


@pytest.mark.parametrize("size", [1, 3, 5])
def test_micro_batches_have_the_whole_batch_s_result(size: int) -> None:
    weights, record = by_engine(size)
    assert largest_difference(weights, unsplit()) < 1e-13
    assert record.history == [(0, size)]


def test_batches_that_are_one_step_are_weighed_as_one() -> None:
    weights, _ = by_engine(3, window=2)
    assert largest_difference(weights, unsplit(window=2)) < 1e-13


@pytest.mark.long
def test_any_allocation_of_a_step_may_fail() -> None:
    """In forward or backward the batch is taken again; the optimizer's own step is finished where it stopped."""
    truth, retries = unsplit(), 0
    counted = count_allocations()
    by_engine(4, faults=counted)
    for point in range(0, counted.allocations, 7):
        faults = fail_at(point)
        weights, record = by_engine(4, faults=faults)
        assert faults.fault is not None
        assert largest_difference(weights, truth) < 1e-13, point
        retries += record.retries
    assert retries > 4


def test_a_batch_that_does_not_split_runs_whole() -> None:
    net, optimizer, _ = parts()
    run, seen = Run(net, [optimizer]), []

    def contrastive(batch: dict[str, Tensor]) -> Tensor:
        seen.append(len(batch["x"]))
        out = net(batch["x"])
        return (out @ out.T).logsumexp(1).mean()

    record = Record()
    engine = Engine(run, BudgetOptions(budget_bytes=2**30), record=record, resumed={})
    step = Step(run, batches()[0], contrastive)
    engine.prepare(step)
    seen.clear()
    engine.drive(step, lambda: {"loss": engine.run(step)[0]})
    engine.close()
    assert seen == [ROWS]


@pytest.mark.long
def test_the_engine_loads_no_lightning() -> None:
    """A subprocess: what is imported here already would hide it."""
    code = (
        "import sys; import lightning_memkit.micro_batching.engine; "
        "found = [name for name in sys.modules if name == 'lightning' or name.startswith('lightning.')]; "
        "sys.exit(f'loaded {found[:5]}' if found else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
