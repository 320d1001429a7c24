"""Operators that are timed on a device: they run on operands that are valid, and one that ends the device is named."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_memkit.memory.device_faults import DeviceFaultError
from lightning_memkit.planning import times
from lightning_memkit.planning.times import TimesHere, part_seconds
from lightning_memkit.prediction.work import OperatorWork, TensorShape, Work

ILLEGAL = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported later."
ASSERTED = "CUDA error: device-side assert triggered"


def shape(*sizes: int, dtype: torch.dtype = torch.float32) -> TensorShape:
    return TensorShape(sizes, tuple(torch.empty(sizes, device="meta").stride()), dtype)


def work_of(name: str, *args: Any, flops: int = 0) -> OperatorWork:
    return OperatorWork(f"aten.{name}", args, (), flops, 64, is_16_bit=False)


# Operands


class NotEstimated(TimesHere):
    def _estimated(self, operator: OperatorWork) -> float:
        raise AssertionError(f"{operator.name} did not run")


WEIGHT, INDICES = shape(4, 8), shape(6, dtype=torch.int64)


@pytest.mark.parametrize(
    "operator",
    [
        work_of("embedding.default", WEIGHT, INDICES),
        work_of("embedding_dense_backward.default", shape(6, 8), INDICES, 4, -1, False),
        work_of("index_select.default", WEIGHT, 0, INDICES),
        work_of("gather.default", WEIGHT, 0, shape(4, 8, dtype=torch.int64)),
        work_of("nll_loss_forward.default", shape(6, 4), INDICES, None, 1, -100),
        work_of("one_hot.default", INDICES, 4),
        work_of("_int_mm.default", shape(32, 32, dtype=torch.int8), shape(32, 32, dtype=torch.int8)),
        work_of("mm.default", shape(4, 4, dtype=torch.int32), shape(4, 4, dtype=torch.int32)),
        work_of("where.self", shape(4, dtype=torch.bool), shape(4), shape(4)),
    ],
    ids=lambda operator: operator.name,
)
def test_whole_numbers_are_valid_places_in_any_tensor(operator):
    assert NotEstimated().seconds(operator) > 0


# A device that fails


class FailingCard:
    """A device as CUDA shows it: after a fault each call reports it, and what is launched before goes unnoticed."""

    def __init__(self) -> None:
        self.fault = ""
        self.launches: list[str] = []

    def synchronize(self, device: Any = None) -> None:
        if self.fault:
            raise RuntimeError(self.fault)

    def current_device(self) -> int:
        self.synchronize()
        return 0

    def get_rng_state(self, device: Any) -> torch.Tensor:
        self.synchronize()
        return torch.zeros(1)

    def set_rng_state(self, state: torch.Tensor, device: Any) -> None:
        self.synchronize()


@pytest.fixture
def card(monkeypatch):
    """Stands in the place of the device "meta", where tensors have no memory."""
    card = FailingCard()
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: card)
    monkeypatch.setattr(torch, "meta", card, raising=False)
    monkeypatch.setattr(times, "_rates_here", lambda device, is_16_bit: (1e12, 1e12))
    return card


def running(card: FailingCard, monkeypatch: pytest.MonkeyPatch, runs: Callable[[], None]) -> TimesHere:
    def launch(name: str) -> Callable[..., None]:
        def function(*args: Any) -> None:
            card.launches.append(name)
            card.synchronize()
            if "tanh" not in name:
                runs()

        return function

    monkeypatch.setattr(times, "_function", launch)
    return TimesHere("meta")


@pytest.mark.parametrize("fault", [ILLEGAL, ASSERTED])
@pytest.mark.parametrize("at_once", [True, False], ids=["by the launch", "by the next wait"])
def test_an_operator_that_ends_the_context_is_named_and_nothing_runs_after_it(
    card, monkeypatch, fault, at_once
):
    def fail() -> None:
        card.fault = fault
        if at_once:
            raise RuntimeError(fault)

    found = running(card, monkeypatch, fail)
    good, bad = work_of("tanh.default", shape(4)), work_of("gather.default", shape(4, 8), 0, shape(2, 8))
    assert found.seconds(good) > 0
    after = work_of("tanh.default", shape(5))
    said = r"Timing aten.gather.default on \(\(4, 8\), \(2, 8\)\) has ended the context of meta: CUDA error: .*restart"
    with pytest.raises(DeviceFaultError, match=said):
        part_seconds(Work(part={good: 1.0, bad: 1.0, after: 1.0}), found)
    assert card.launches[-1] == "aten.gather.default"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError(
            "CUDA error: invalid configuration argument"
        ),  # a refused launch leaves the device as it was
        NotImplementedError("no kernel of this operator"),
        IndexError("index out of range in self"),
    ],
    ids=lambda error: str(error)[:30],
)
def test_after_any_other_error_an_operator_is_estimated(card, monkeypatch, error):
    def fail() -> None:
        raise error

    found = running(card, monkeypatch, fail)
    assert found.seconds(work_of("gather.default", shape(4), flops=10**12)) == pytest.approx(1.0)
    assert found.seconds(work_of("tanh.default", shape(4))) > 0


def test_a_wait_that_runs_out_of_memory_ends_nothing(card, monkeypatch):
    def fail() -> None:
        card.fault = "CUDA error: out of memory"
        raise RuntimeError(card.fault)

    assert running(card, monkeypatch, fail).seconds(work_of("gather.default", shape(4), flops=10**12)) > 0.9
