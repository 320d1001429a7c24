import pytest
import torch

from lightning_memkit.memory import measure
from lightning_memkit.memory.cublas import cublas_bytes
from lightning_memkit.memory.limits import Limit
from lightning_memkit.memory.units import format_bytes
from tests.testing.fake_device import fake_device
from tests.testing.needs import NEEDS_COMPILER

CPU = torch.device("cpu")
MIB = 2**20


def test_capacity_of_the_host_is_its_tightest_limit_s(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [
        Limit(total_bytes=64 * 2**30, free_bytes=2 * 2**30, source="RAM"),
        Limit(total_bytes=8 * 2**30, free_bytes=5 * 2**30, source="memory.max of the cgroup /job"),
    ]
    monkeypatch.setattr(measure, "host_limits", lambda: limits)
    have = measure.capacity(CPU)
    assert (have.total_bytes, have.free_bytes) == (8 * 2**30, 2 * 2**30)
    assert measure.budget_bytes(0.5, CPU) == 4 * 2**30
    assert measure.budget_bytes("auto", CPU) == measure.budget_bytes("Auto", CPU) == 2 * 2**30
    assert measure.budget_bytes("1GiB", CPU) == 2**30
    assert measure.budget_bytes(float(2**30), CPU) == 2**30
    with pytest.raises(ValueError, match=r"more than cpu has \(8.00 GiB, by memory.max of the cgroup /job\)"):
        measure.budget_bytes("9GiB", CPU)


@pytest.mark.parametrize(
    ("budget", "remedy"),
    [
        (90.0, 'write "90GiB", for 90 % of the device 0.9'),
        (1.5, 'write "1.5GiB", for 1.5 %'),
        (-0.5, "outside"),
        (24, 'write "24GiB"'),
        (0, "outside"),
        (-5, "outside"),
        ("-1GiB", "no positive size"),
        ("1KiB", r"only 1.00 KiB: .*at least 64 KiB"),
        ("lots", "22GiB"),
        ("24", 'write "24GiB"'),
        (float("nan"), "nan is not a budget: a budget is a size"),
        (float("inf"), "inf is not a budget: a budget is a size"),
        (True, "not a budget"),
        (None, "not a budget"),
    ],
)
def test_unreadable_budgets_name_the_rule_and_the_remedy(budget: object, remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        measure.check_budget(budget)


@pytest.mark.parametrize("budget", ["22GiB", 0.9, 1.0, "auto", "AUTO", "90 percent", 8388608, 8388608.0])
def test_readable_budgets_pass(budget: object) -> None:
    measure.check_budget(budget)


def test_on_cuda_a_budget_leaves_room_for_what_the_driver_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    have = measure.Capacity(total_bytes=24 * 2**30, free_bytes=23 * 2**30)
    monkeypatch.setattr(measure, "capacity", lambda device: have)
    monkeypatch.setattr(measure, "fixed_bytes", lambda device: 2**30)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 9))
    device = torch.device("cuda")
    assert measure.budget_bytes(0.5, device) == 11 * 2**30
    assert measure.budget_bytes("auto", device) == 23 * 2**30
    assert measure.budget_bytes("23GiB", device) == 23 * 2**30
    with pytest.raises(ValueError, match=r"1.00 GiB are other processes' .* write a size up to 23.00 GiB"):
        measure.budget_bytes("24GiB", device)
    with pytest.raises(ValueError, match=r"budget=0.01 of cuda .* leaves nothing"):
        measure.budget_bytes(0.01, device)


class SharedCard:
    """Stands for `torch.cuda` on a card of 80 GiB: others hold 30, this process's allocator 4."""

    total, free, reserved = 80 * 2**30, 46 * 2**30, 4 * 2**30

    def mem_get_info(self, device: object) -> tuple[int, int]:
        return self.free, self.total

    def memory_reserved(self, device: object) -> int:
        return self.reserved

    def get_device_capability(self, device: object) -> tuple[int, int]:
        return 9, 0


def test_on_a_shared_card_a_budget_is_held_against_what_the_others_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: SharedCard())
    device = torch.device("cuda")
    assert measure.fixed_bytes(device) == 30 * 2**30
    assert measure.capacity(device) == measure.Capacity(total_bytes=80 * 2**30, free_bytes=46 * 2**30)
    assert measure.budget_bytes("50GiB", device) == 50 * 2**30  # what it holds already is its own
    assert (
        measure.budget_bytes("auto", device) == 50 * 2**30
    )  # in a second fit, too, or with weights made there
    with pytest.raises(
        ValueError, match=r"more than cuda has \(80.00 GiB, of which 30.00 GiB are other processes'"
    ):
        measure.budget_bytes("51GiB", device)


@pytest.mark.parametrize(
    ("capability", "config", "needed"),
    [
        ((9, 0), "", 2 * 32 * MIB),
        ((8, 9), "", 2 * 8_320 * 1024),
        ((9, 0), ":4096:2:16:8", 2 * 8_320 * 1024),
        ((9, 0), ":16:8", 2 * 128 * 1024),
        ((9, 0), "nonsense", 2 * 32 * MIB),
    ],
)
def test_a_budget_that_cublas_alone_takes_is_refused(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], config: str, needed: int
) -> None:
    card = SharedCard()
    monkeypatch.setattr(card, "get_device_capability", lambda device: capability, raising=False)
    monkeypatch.setattr(torch, "get_device_module", lambda device: card)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", config)
    device = torch.device("cuda")
    assert cublas_bytes(device) == needed
    assert measure.budget_bytes(needed + 2**16, device) == needed + 2**16
    with pytest.raises(
        ValueError, match=rf"budget={needed} .*cuBLAS keeps {format_bytes(needed)}.*larger budget"
    ):
        measure.budget_bytes(needed, device)


def test_auto_is_refused_where_other_processes_leave_no_more_than_cublas_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = SharedCard()
    card.reserved = 24 * MIB  # this process's own, which count as room
    monkeypatch.setattr(torch, "get_device_module", lambda device: card)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    device = torch.device("cuda")
    card.free = 40 * MIB + 2**20
    assert measure.budget_bytes("auto", device) == 65 * MIB
    card.free = 40 * MIB
    with pytest.raises(
        ValueError, match=r"budget='auto' \(64.00 MiB\) leaves nothing .*cuBLAS keeps 64.00 MiB.*End other"
    ):
        measure.budget_bytes("auto", device)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # the remedy
    assert measure.budget_bytes("auto", device) == 64 * MIB


def test_cublas_takes_nothing_of_what_is_not_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cublas_bytes(CPU) == 0
    monkeypatch.setattr("torch.version.hip", "7.0")
    assert cublas_bytes(torch.device("cuda")) == 0


class Counters:
    """Stands for a device's module whose allocator caches: it reserves more than it hands out."""

    def __init__(self, caches: bool) -> None:
        self.calls: list[str] = []
        if caches:
            self.max_memory_reserved = lambda device: 3000

    def synchronize(self, device: object) -> None:
        self.calls.append("synchronize")

    def empty_cache(self) -> None:
        self.calls.append("empty")

    def reset_peak_memory_stats(self, device: object) -> None:
        self.calls.append("reset")

    def max_memory_allocated(self, device: object) -> int:
        return 2000


@pytest.mark.parametrize(("caches", "peak"), [(True, 3000), (False, 2000)])
def test_an_accelerator_s_own_counters_are_read(
    monkeypatch: pytest.MonkeyPatch, caches: bool, peak: int
) -> None:
    counters = Counters(caches)
    monkeypatch.setattr(torch, "get_device_module", lambda device: counters)
    device = torch.device("xpu")
    with measure.peak_meter(device, [], budget_bytes=peak) as meter:
        assert counters.calls == ["synchronize", "empty", "reset"]
    assert meter.peak_bytes == peak
    with (
        pytest.raises(torch.OutOfMemoryError, match="over the budget"),
        measure.peak_meter(device, [], peak - 1),
    ):
        pass


def test_elsewhere_bytes_are_counted_operator_by_operator() -> None:
    resident = torch.zeros(100)
    meter = measure.peak_meter(CPU, [resident])
    with meter:
        torch.empty(50)
    assert meter.peak_bytes == 600


@NEEDS_COMPILER
def test_the_device_s_own_allocator_sees_what_operators_take_inside() -> None:
    with fake_device() as device:
        x = torch.zeros(1000, device="fake")
        with measure.peak_meter(device.torch_device, []) as meter:
            y = x + 1
            del y
        assert meter.peak_bytes == device.peak_bytes == 8000
