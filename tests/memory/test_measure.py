import pytest
import torch

from lightning_memkit.memory import measure

CPU = torch.device("cpu")


def test_capacity_of_the_host_is_its_cgroup_s_limit_where_that_is_lower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure, "_host_memory", lambda: (64 * 2**30, 60 * 2**30))
    monkeypatch.setattr(measure, "_cgroup_memory", lambda: (8 * 2**30, 3 * 2**30))
    have = measure.capacity(CPU)
    assert (have.total_bytes, have.free_bytes) == (8 * 2**30, 5 * 2**30)
    assert measure.budget_bytes(0.5, CPU) == 4 * 2**30
    assert measure.budget_bytes("auto", CPU) == 5 * 2**30
    assert measure.budget_bytes("1GiB", CPU) == 2**30
    assert measure.budget_bytes(float(2**30), CPU) == 2**30
    with pytest.raises(ValueError, match=r"more than cpu has \(8.00 GiB\)"):
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
        (True, "not a budget"),
        (None, "not a budget"),
    ],
)
def test_unreadable_budgets_name_the_rule_and_the_remedy(budget: object, remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        measure.check_budget(budget)


@pytest.mark.parametrize("budget", ["22GiB", 0.9, 1.0, "auto", 8388608, 8388608.0])
def test_readable_budgets_pass(budget: object) -> None:
    measure.check_budget(budget)


def test_on_cuda_a_budget_leaves_room_for_what_the_driver_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    have = measure.Capacity(total_bytes=24 * 2**30, free_bytes=23 * 2**30)
    monkeypatch.setattr(measure, "capacity", lambda device: have)
    monkeypatch.setattr(measure, "fixed_bytes", lambda device: 2**30)
    device = torch.device("cuda")
    assert measure.budget_bytes(0.5, device) == 11 * 2**30
    assert measure.budget_bytes("auto", device) == 23 * 2**30
    assert measure.budget_bytes("23GiB", device) == 23 * 2**30
    with pytest.raises(ValueError, match=r"1.00 GiB of which the driver holds"):
        measure.budget_bytes("24GiB", device)
