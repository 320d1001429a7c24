import pytest

from lightning_memkit import Budget
from lightning_memkit.prediction.devices import DEVICES, Device


def test_a_budget_is_bytes_of_a_device():
    card = DEVICES["rtx4090"]
    assert Budget("20GiB", "rtx4090").bytes() == 20 * 2**30
    assert Budget("24GiB", "rtx4090").bytes() == card.usable_bytes < 24 * 2**30  # the context lies beside it
    assert Budget(0.5, card).bytes() == card.memory_bytes // 2
    assert Budget("auto", "rtx4090").bytes() == card.usable_bytes
    assert Budget("1GiB", "cpu").bytes() == 2**30
    assert Budget("1GiB", "cpu", headroom=0.25).usable_bytes() == 3 * 2**28
    assert "19.00 GiB on rtx4090" in str(Budget("19GiB", "rtx4090"))


def test_here_is_the_cpu_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert Budget("1GiB").target() is None


def test_a_gpu_that_is_here_is_known_by_its_name(monkeypatch):
    class Properties:
        name, total_memory = "NVIDIA GeForce RTX 4090", 25_000_000_000

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: Properties)
    target = Budget("20GiB").target()
    assert isinstance(target, Device)
    assert (target.name, target.memory_bytes) == ("rtx4090", 25_000_000_000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": "24 gigs"}, "24 gigs"),
        ({"memory": 0}, "0"),
        ({"device": "rtx9090"}, "device='rtx9090' is unknown .*; known are h200.*Device"),
        ({"goal": "fun"}, "goal='fun' is unknown; choose one of 'speed', 'memory', 'exact'"),
        ({"headroom": 5}, r"headroom=5 is outside \[0, 1\); for 5 % write 0.05"),
    ],
)
def test_bad_budgets_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Budget(**options)
