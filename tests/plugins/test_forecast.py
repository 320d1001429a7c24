"""A MemoryBudget that predicts before it measures, and an automatic policy that what was measured corrects."""

import os
import re
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_memkit import (
    ActivationCheckpointing,
    ActivationOffload,
    Budget,
    MemoryBudget,
    PureBF16Precision,
    plan,
)
from lightning_memkit.memory.sizing import Sizing
from lightning_memkit.memory.units import parse_bytes
from lightning_memkit.micro_batching.sizes.sizing import BudgetError, Foreseen
from lightning_memkit.planning import budget as planning_budget
from lightning_memkit.plugins.memory_budget import _forecast, callback
from lightning_memkit.prediction.devices import DEVICES
from lightning_memkit.prediction.residuals import keep_residual, residual_of
from tests.plugins.test_prediction import Language, Loader, batch

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")
ROWS, LENGTH = 16, 64


@pytest.fixture
def predicting(monkeypatch: pytest.MonkeyPatch) -> list[Foreseen | None]:
    """Small models are predicted, too; what was foreseen."""
    monkeypatch.setattr(_forecast, "PAYS_FROM_PARAMETERS", 0)
    found: list[Foreseen | None] = []

    def noted(*args: Any) -> Foreseen | None:
        found.append(_forecast.foreseen(*args))
        return found[-1]

    monkeypatch.setattr(callback, "foreseen", noted)
    return found


def trained(*callbacks: Any, model: Any = None, steps: int = 2, **options: Any) -> Any:
    model = model or Language()
    trainer = Trainer(
        **options, callbacks=list(callbacks), max_steps=steps, accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, Loader(batch(ROWS, LENGTH), steps))
    return model


def sizing_of(budget: MemoryBudget) -> Sizing:
    assert budget.sizing is not None
    return budget.sizing


def measuring() -> Sizing:
    budget = MemoryBudget("6MiB")
    trained(budget)
    return sizing_of(budget)


CASES = {
    "plain": (lambda: [], {}),
    "clipped": (lambda: [], {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "norm"}),
    "checkpointed": (lambda: [ActivationCheckpointing("every:2")], {}),
    "offloaded": (lambda: [ActivationOffload()], {}),
    "mixed": (lambda: [], {"precision": "bf16-mixed"}),
    "accumulated": (lambda: [], {"accumulate_grad_batches": 2}),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.long
def test_the_predicted_size_is_verified_by_one_trial(predicting, monkeypatch, case):
    callbacks, options = CASES[case]
    budget = MemoryBudget("4MiB")
    model = trained(*callbacks(), budget, **options)
    (found,) = predicting
    assert found is not None
    assert len(sizing_of(budget).trials) == 1
    size, peak = sizing_of(budget).micro_batch_size, sizing_of(budget).peak_bytes
    assert 1 < size < ROWS
    assert peak == pytest.approx(found.peaks[size], rel=0.02)
    monkeypatch.setattr(callback, "foreseen", lambda *_: None)
    torch.manual_seed(0)
    plain = MemoryBudget("4MiB")
    measured = trained(*callbacks(), plain, **options)
    assert sizing_of(plain).micro_batch_size == size
    assert len(sizing_of(plain).trials) > 1
    assert sizing_of(plain).peak_bytes == peak
    assert model.state_dict().keys() == measured.state_dict().keys()


def test_pure_bfloat16_is_predicted_with_its_compensation(predicting):
    budget = MemoryBudget("3MiB")
    trained(budget, plugins=PureBF16Precision())
    (found,) = predicting
    assert len(sizing_of(budget).trials) == 1
    # Of so small a model, the tiles of a compensated step are a few per cent.
    assert sizing_of(budget).peak_bytes == pytest.approx(
        found.peaks[sizing_of(budget).micro_batch_size], rel=0.06
    )


@pytest.mark.long
def test_training_is_the_same_with_a_prediction_and_without(predicting, monkeypatch):
    def weights() -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        return trained(MemoryBudget("4MiB"), steps=3).state_dict()

    first = weights()
    monkeypatch.setattr(callback, "foreseen", lambda *_: None)
    second = weights()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_card_is_that_of_the_run_though_a_fork_finds_none(monkeypatch):
    """A fork of a process that has used CUDA sees no device: it would predict for the CPU."""
    here, found = os.getpid(), []
    monkeypatch.setattr(_forecast, "PAYS_FROM_PARAMETERS", 0)
    monkeypatch.setattr(
        planning_budget, "_gpu_here", lambda: DEVICES["h200"] if os.getpid() == here else None
    )

    def root(strategy: Any) -> torch.device:  # in the fork the CPU's accelerator looks at it
        return torch.device("cuda" if os.getpid() == here else "cpu")

    def on_a_card(trainer: Trainer, *args: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(type(trainer.strategy), "root_device", property(root))
            found.append(_forecast.foreseen(trainer, *args))

    monkeypatch.setattr(callback, "foreseen", on_a_card)
    trained(MemoryBudget("1GiB"))
    assert found[0] is not None
    assert min(found[0].peaks.values()) > DEVICES["h200"].library_bytes  # which nothing on the CPU has


@pytest.mark.sampled(2)
@pytest.mark.parametrize("off", [0.5, 0.8, 1.3, 3.0])
@pytest.mark.long
def test_a_wrong_prediction_is_corrected_by_what_was_measured(predicting, monkeypatch, off):
    right = measuring()

    def wrong(*args: Any) -> Foreseen:
        found = _forecast.foreseen(*args)
        assert found is not None
        return Foreseen(peaks={size: int(off * peak) for size, peak in found.peaks.items()})

    monkeypatch.setattr(callback, "foreseen", wrong)
    sizing = measuring()
    assert sizing.micro_batch_size == right.micro_batch_size
    assert sizing.peak_bytes == right.peak_bytes


def test_a_module_that_can_not_be_predicted_is_measured(predicting):
    class Asking(Language):
        def on_train_start(self) -> None:
            assert self.trainer.max_steps == 2, "what only the trainer knows"

    budget = MemoryBudget("6MiB")
    trained(budget, model=Asking())
    assert predicting == [None]
    assert budget.sizing is not None


def test_small_models_are_measured_at_once(monkeypatch):
    monkeypatch.setattr(_forecast, "predict_apart", lambda *_, **__: pytest.fail("predicted"))
    assert len(measuring().trials) > 1


def test_the_residual_of_a_run_is_kept_and_expected_in_the_next(predicting, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("MEMKIT_TUNING_CACHE", "1")
    assert residual_of("cpu") == 1.0
    sizing = measuring()
    (found,) = predicting
    assert residual_of("cpu") == pytest.approx(sizing.peak_bytes / found.peaks[sizing.micro_batch_size])
    for ratio in (1.2, 1.2, 1.2):
        keep_residual("cpu", ratio)
    keep_residual("cpu", 7.0)  # of something else
    assert residual_of("cpu") == 1.2
    monkeypatch.setenv("MEMKIT_TUNING_CACHE", "0")
    assert residual_of("cpu") == 1.0
    keep_residual("cpu", 1.9)
    monkeypatch.setenv("MEMKIT_TUNING_CACHE", "1")
    (tmp_path / "lightning_memkit" / "prediction_residuals" / "cpu.json").write_text("{")
    assert residual_of("cpu") == 1.0


def test_a_plan_counts_on_the_residual_of_its_device(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("MEMKIT_TUNING_CACHE", "1")
    given = {"precision": "32-true", "callbacks": [ActivationCheckpointing("full")]}

    def taken() -> tuple[int, str]:
        found = plan(Language(), batch(ROWS, LENGTH), Budget("1GiB", "cpu", "memory"), trainer=given)
        return found.best.taken_bytes, str(found)

    plain, said = taken()
    assert "earlier runs" not in said
    keep_residual("cpu", 1.2)
    keep_residual("rtx4090", 1.9)
    more, said = taken()
    assert more == round(1.2 * plain)
    assert "120.0% of what is predicted, as earlier runs on this device had it" in said


@pytest.mark.long
def test_where_nothing_fits_it_says_what_would_as_predicted(predicting):
    with pytest.raises(BudgetError, match="What fits, as predicted: ") as caught:
        trained(MemoryBudget("2600KiB"))
    said = str(caught.value)
    assert "changes" in said
    takes = [parse_bytes(size) for size in re.findall(r"predicted at ([\d.]+ [KM]iB)", said)]
    assert takes
    assert max(takes) <= 0.95 * parse_bytes("2600KiB") * 1.01
    with pytest.raises(BudgetError, match="Nothing that may be chosen fits, as predicted; the least is "):
        trained(MemoryBudget("900KiB"))


# ActivationCheckpointing("auto")


def peak_under(memory: str, policy: str, **options: Any) -> MemoryBudget:
    budget = MemoryBudget(memory, micro_batch_size=8)
    trained(ActivationCheckpointing(policy), budget, **options)
    return budget


def sgd() -> Language:
    return Language(torch.optim.SGD, layers=6)  # "auto" assumes AdamW's states at first


@pytest.mark.long
def test_what_auto_leaves_unused_is_used_after_all():
    none, full = (
        trained_peak(MemoryBudget("1GiB", micro_batch_size=8), *policy)
        for policy in ((), (ActivationCheckpointing("full"),))
    )
    memory = (none + full) // 2
    budget = MemoryBudget(memory, micro_batch_size=8, headroom=0.0)
    trained(ActivationCheckpointing("auto"), budget, model=sgd())
    assert full < budget.peak_bytes <= memory
    assert budget.peak_bytes >= 0.9 * memory
    first, second = sizing_of(budget).trials
    assert first.peak_bytes is not None
    assert second.peak_bytes is not None
    assert first.peak_bytes < second.peak_bytes == budget.peak_bytes


def trained_peak(budget: MemoryBudget, *callbacks: Any) -> int:
    trained(*callbacks, budget, model=sgd())
    return budget.peak_bytes


@pytest.mark.long
def test_what_auto_takes_too_much_is_made_again():
    """Compensation and float32 sums of gradients are not in its first estimate."""

    def run(memory: Any, policy: str) -> MemoryBudget:
        budget = MemoryBudget(memory, micro_batch_size=8, headroom=0.0)
        model = Language(layers=6, width=96)
        trained(ActivationCheckpointing(policy), budget, model=model, plugins=PureBF16Precision())
        return budget

    full = run("1GiB", "full").peak_bytes
    memory = int(1.03 * full)
    assert run(memory, "auto").peak_bytes <= memory
