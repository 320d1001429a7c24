"""Values that move without two copies in memory."""

import pytest
import torch

from lightning_memkit.initialization import pages
from lightning_memkit.initialization.pages import drop_pages, move_values
from lightning_memkit.prediction.devices import DEVICES
from lightning_memkit.prediction.simulation import Simulation


def test_values_move_in_pieces_of_which_each_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped = list[tuple[int, int]]()
    monkeypatch.setattr(pages, "_drop", lambda start, end: dropped.append((start, end)) or end)
    source = torch.randn(3 * 2**18)  # 3 MiB
    target = torch.empty(source.shape, dtype=torch.bfloat16)
    move_values(source, target)
    assert torch.equal(target, source.bfloat16())
    assert len(dropped) == 3


@pytest.mark.parametrize("device", [None, DEVICES["rtx4090"]], ids=["cpu", "card"])
def test_a_predictions_tensors_move_whole_and_have_no_pages(device, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise AssertionError("no address of a fake tensor is ours")

    monkeypatch.setattr(pages, "_drop", refused)
    with Simulation(device) as simulation:
        source = torch.empty(2**26)
        target = torch.empty(source.shape, dtype=torch.bfloat16)
        before = simulation.operators
        move_values(source, target)
        drop_pages(source)
        assert simulation.operators == before + 1
