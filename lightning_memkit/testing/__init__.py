"""Tools for memory tests: make allocations fail deliberately, one by one or over a budget."""

from lightning_memkit.testing.budgets import ByteBudget, byte_budget
from lightning_memkit.testing.faults import (
    FailingAllocator,
    Fault,
    Faults,
    count_allocations,
    fail_at,
)
from lightning_memkit.testing.sweeps import Outcome, sweep

__all__ = [
    "ByteBudget",
    "FailingAllocator",
    "Fault",
    "Faults",
    "Outcome",
    "byte_budget",
    "count_allocations",
    "fail_at",
    "sweep",
]
