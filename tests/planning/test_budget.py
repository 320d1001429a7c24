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
        ({"memory": "24 gogs"}, "24 gogs"),
        ({"memory": float("nan")}, "budget=nan is not a budget: .*22GiB"),
        ({"memory": float("inf")}, "budget=inf is not a budget: .*22GiB"),
        ({"memory": "24"}, "budget='24' is only 24 B: .*; for GiB write \"24GiB\""),
        ({"headroom": "x"}, r"headroom='x' is outside \[0, 1\); for 5 % write 0.05"),
        ({"headroom": float("nan")}, "headroom=nan is outside"),
        ({"memory": 0}, "0"),
        ({"device": "rtx9090"}, "device='rtx9090' is unknown; .*Device"),
        ({"goal": "fun"}, "goal='fun' is unknown; choose one of 'speed', 'memory', 'exact'"),
        ({"headroom": 5}, r"headroom=5 is outside \[0, 1\); for 5 % write 0.05"),
    ],
)
def test_bad_budgets_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Budget(**options)


@pytest.mark.parametrize("memory", ["30GiB", "24T", 2**35])
def test_more_than_a_card_has_is_refused(memory):
    with pytest.raises(
        ValueError, match=rf"budget={memory!r} is more than rtx4090 has \(23.99 GiB, 23.50 GiB beside"
    ):
        Budget(memory, "rtx4090")


@pytest.mark.parametrize(
    ("device", "memory"), [("l4", "24GiB"), ("t4", "16GiB"), ("b200", "192GB"), ("l40s", "48GiB")]
)
def test_the_memory_that_a_card_is_sold_with_is_all_of_it(device, memory):
    assert Budget(memory, device).bytes() == DEVICES[device].usable_bytes


@pytest.mark.parametrize("written", ["cuda", "cuda:1", "GPU", "gpu:1", " Auto "])
def test_a_card_of_this_machine_by_the_names_of_torch(monkeypatch, written):
    class Properties:
        name, total_memory, major = "NVIDIA GeForce RTX 4090", 25_000_000_000, 8

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    asked = []
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: asked.append(index) or Properties)
    budget = Budget("20GiB", written)
    target = budget.target()
    assert target is not None
    assert target.name == "rtx4090"
    assert budget.here == ("cuda:1" if written.endswith("1") else "cuda")
    assert set(asked) == {int(written.endswith("1"))}
    with pytest.raises(ValueError, match="device='cuda:2' is a GPU of this machine, and torch sees 2 here"):
        Budget("20GiB", "cuda:2")


def test_a_card_of_this_machine_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(
        ValueError, match="device='cuda' is a GPU of this machine, and torch sees none here; write dev"
    ):
        Budget("20GiB", "cuda")
    assert Budget("20GiB", "rtx4090").here is None


def test_an_unknown_card_of_this_machine_has_bfloat16_from_ampere_on(monkeypatch):
    class Properties:
        name, total_memory, major = "Quadro GV100", 32 * 2**30, 7

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: Properties)
    for major, has_bfloat16 in ((7, False), (8, True)):
        Properties.major = major
        target = Budget("20GiB").target()
        assert target is not None
        assert target.rates_of
        assert target.has_bfloat16 is has_bfloat16
