"""Tools for tests of memory: allocations that fail on purpose, and an accelerator without hardware that counts."""

from lightning_memkit.testing.fake_device import FakeDevice, Transfers, compiler, fake_device
from lightning_memkit.testing.faults import (
    ByteBudget,
    Fault,
    Faults,
    byte_budget,
    count_allocations,
    fail_at,
)
from lightning_memkit.testing.sweeps import Outcome, sweep

__all__ = [
    "ByteBudget",
    "FakeDevice",
    "Fault",
    "Faults",
    "Outcome",
    "Transfers",
    "byte_budget",
    "compiler",
    "count_allocations",
    "fail_at",
    "fake_device",
    "sweep",
]
