"""Steps in chunks that run out of memory somewhere, and the fault-free runs that they must equal."""

from collections.abc import Callable
from typing import Any

import torch

from lightning_memkit import MemoryBudget
from lightning_memkit.memory.meter import ByteMeter
from tests.plugins.toys import weights

Run = Callable[..., tuple[Any, Any]]  # from callbacks to the trained module, and the trainer


class Fails(MemoryBudget):
    """Fails one allocation of batch 2's step."""

    def __init__(self, budget: str, fail_at: int) -> None:
        super().__init__(budget)
        self.meter = ByteMeter(fail_at=fail_at)

    def drive(self, step: Any, optimize: Any) -> Any:
        if step.batch_idx != 2 or self._engine is None:
            return super().drive(step, optimize)
        with self.meter:
            return super().drive(step, optimize)


class Sets(MemoryBudget):
    """Sets the (rows, tokens) of a chunk batch by batch, the last ones from then on."""

    def __init__(self, budget: str, *chunks: tuple[int | None, int | None]) -> None:
        super().__init__(budget)
        self.chunks = chunks

    def drive(self, step: Any, optimize: Any) -> Any:
        if self._engine is not None:
            self._engine.runner.partition.run_in_chunks(
                *self.chunks[min(step.batch_idx, len(self.chunks) - 1)]
            )
        return super().drive(step, optimize)


def assert_retried_wherever_it_fails(run: Run, budget: str, axis: str, faults: int) -> None:
    """Fail some allocations of a step in chunks: each time it is retried in half of them, bitwise."""
    counted = Fails(budget, 10**9)
    straight, _ = run(counted)
    chunk = getattr(counted.sizing, axis)
    assert chunk is not None
    smaller = (chunk + 1) // 2
    sizes = [(size, None) if axis == "chunk_rows" else (None, size) for size in (chunk, chunk, smaller)]
    oracle, _ = run(Sets(budget, *sizes))
    total = counted.meter.allocations
    assert total > 100
    retried = 0
    for fail_at in range(0, total, -(-total // faults)):
        failing = Fails(budget, fail_at)
        module, _ = run(failing)
        # What fails in the optimizer's own step is finished there.
        assert torch.equal(weights(module), weights(oracle if failing.retries else straight)), fail_at
        assert getattr(failing.history[-1], axis) == (smaller if failing.retries else chunk)
        retried += failing.retries
    assert retried >= 4


def assert_goes_on_in_chunks(run: Run, axis: str, expected: int) -> None:
    """A batch that fit runs out of memory twice, as the first time may be a fragmented cache: chunks from then on."""
    plain, _ = run()
    budget = MemoryBudget("64MiB")
    fails = iter([40, 60])

    def drive(step: Any, optimize: Any) -> Any:
        def failing() -> Any:
            at = next(fails, None) if step.batch_idx == 2 else None
            with ByteMeter(fail_at=at):
                return optimize()

        return MemoryBudget.drive(budget, step, failing)

    budget.drive = drive
    module, _ = run(budget)
    assert budget.retries == 2
    assert getattr(budget.history[-1], axis) == expected
    assert float((weights(module) - weights(plain)).abs().max()) <= 1e-11
