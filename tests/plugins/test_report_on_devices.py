"""When a report predicts: on an accelerator before the first batch has run, on the CPU once the metered one has."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lightning_memkit import MemoryReport
from lightning_memkit.plugins.memory_report import _foresight
from lightning_memkit.plugins.memory_report._foresight import PredictedRun
from tests.plugins.fake_accelerator import on_fake_device
from tests.plugins.test_prediction import Language, Loader, batch
from tests.plugins.toys import trained
from tests.testing.fake_device import fake_device
from tests.testing.needs import NEEDS_COMPILER

ROWS, LENGTH, STEPS = 4, 16, 3


class CountsBackwards(Language):
    """Knows how many backwards of it have run: after the first one autograd works in no fork beside a card."""

    def __init__(self) -> None:
        super().__init__()
        self.backwards = 0

    def on_after_backward(self) -> None:
        self.backwards += 1


@pytest.fixture
def predicted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[int, str]]:
    """Backwards that had run at each prediction, and where its batch was; nothing is predicted."""
    found: list[tuple[int, str]] = []

    def work(self: Any, trainer: Any, given: dict[str, Tensor]) -> Callable[[Any], PredictedRun]:
        found.append((trainer.lightning_module.backwards, given["ids"].device.type))
        return lambda run: PredictedRun()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_foresight.Foresight, "_work", work)
    monkeypatch.setattr(_foresight, "predict_apart", lambda trainer, work, *, timeout_s: work(None))
    return found


def fitted(**options: Any) -> None:
    report = MemoryReport(live=False, watched_steps=0, predict=True)
    data = Loader(batch(ROWS, LENGTH), STEPS)
    trained(report, module=CountsBackwards, data=data, max_steps=STEPS, **options)


@NEEDS_COMPILER
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_on_an_accelerator_the_first_batch_is_predicted_before_it_runs(predicted):
    with fake_device():
        fitted(accelerator="auto", **on_fake_device())
    assert predicted == [(0, "fake")]


def test_on_the_cpu_the_metered_batch_is_predicted_after_it_has_run(predicted):
    fitted()
    assert [where for _, where in predicted] == ["cpu"]
    assert predicted[0][0] > 0
