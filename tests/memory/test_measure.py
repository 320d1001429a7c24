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
    with pytest.raises(ValueError, match=r"more than cpu has \(8.00 GiB\)"):
        measure.budget_bytes("9GiB", CPU)


@pytest.mark.parametrize(
    ("budget", "remedy"),
    [
        (90.0, "for 90 % write 0.9"),
        (-0.5, "outside"),
        (24, 'write "24GiB"'),
        ("-1GiB", "can't be read"),
        ("lots", "22GiB"),
        (0, "can't be read"),
        (True, "not a budget"),
    ],
)
def test_unreadable_budgets_name_the_rule_and_the_remedy(budget: float | str, remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        measure.check_budget(budget)
