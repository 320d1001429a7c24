"""A second callback of the same class is refused before anything runs, where it would do the same once more."""

from collections.abc import Callable
from pathlib import Path

import pytest
from lightning.pytorch import Callback

from lightning_memkit import ActivationCheckpointing, MemoryBudget, MemoryReport, OptimizerOffload
from tests.plugins.toys import TokenTagger, trained


@pytest.mark.parametrize(
    "make",
    [lambda: ActivationCheckpointing("full", blocks=["GRU"]), MemoryReport, OptimizerOffload],
    ids=["ActivationCheckpointing", "MemoryReport", "OptimizerOffload"],
)
def test_a_twin_is_refused_in_a_sentence(make: Callable[[], Callback], tmp_path: Path) -> None:
    ran = TokenTagger()
    with pytest.raises(ValueError, match=r"The Trainer has 2 \w+ callbacks, and takes one: remove the other"):
        trained(make(), make(), module=lambda: ran, max_steps=1, default_root_dir=tmp_path)
    assert ran.steps == []


def test_one_of_each_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module, _ = trained(MemoryReport(live=False), MemoryBudget("1GiB"), max_steps=1)
    assert isinstance(module, TokenTagger)
    assert len(module.steps) == 1
