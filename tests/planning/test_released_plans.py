"""Plans with released gradients: trained as planned they take what was predicted; what they can't go with is said."""

import gc
from typing import Any

import pytest
from lightning.pytorch import Trainer
from torch import nn

from lightning_memkit import (
    ActivationCheckpointing,
    ActivationOffload,
    Budget,
    GradientRelease,
    MemoryBudget,
    PureBF16Precision,
    plan,
)
from lightning_memkit.memory.allocator_trace import AllocatorTrace
from lightning_memkit.planning.choices import RELEASED
from lightning_memkit.plugins.callbacks.optimizer_offload import OptimizerOffload
from lightning_memkit.prediction.contained import contained
from tests.plugins.test_prediction import Language, Loader, batch
from tests.plugins.test_prediction_offload import SCALARS, Deep, measured
from tests.plugins.test_prediction_offload import batch as deep_batch
from tests.testing.needs import NEEDS_COMPILER

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:UserWarning"),
    pytest.mark.filterwarnings("ignore::lightning_memkit.NoEffectWarning"),
]

ROWS, LENGTH = 4, 32
FULL = {"precision": "32-true", "callbacks": [ActivationCheckpointing("full")]}


def planned(budget: Budget, **given: Any) -> Any:
    return plan(lambda: Language(width=128), batch(ROWS, LENGTH), budget, trainer={**FULL, **given})


def peak_of(kwargs: dict[str, Any]) -> int:
    def train() -> int:
        trainer = Trainer(
            **kwargs, max_steps=3, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        with AllocatorTrace() as trace:
            trainer.fit(Language(width=128), Loader(batch(ROWS, LENGTH), 3))
        return trace.peak_bytes

    gc.collect()
    return contained(train)


def test_training_as_planned_takes_what_was_predicted():
    """Nothing is timed: the least memory is looked for."""
    found = planned(Budget("64MiB", "cpu", "memory"))
    best = found.best
    assert best.family["gradients"].name == RELEASED
    assert (best.micro_batch_size, best.parts) == (ROWS, 1)
    kept = min(row.taken_bytes for row in found.fitting if not row.family.is_released)
    assert best.taken_bytes < kept
    kwargs = found.trainer_kwargs()
    # No MemoryBudget: its trial step has all gradients alive.
    names = [type(one).__name__ for one in kwargs["callbacks"]]
    assert names == ["ActivationCheckpointing", "GradientRelease"]
    assert "accumulate_grad_batches" not in kwargs
    assert best.taken_bytes == pytest.approx(peak_of(kwargs), rel=0.03)
    assert found.config()["trainer"]["callbacks"] == [{"class_path": "lightning_memkit.GradientRelease"}]


@pytest.mark.long
def test_a_budget_that_only_released_gradients_fit():
    least = min(
        row.taken_bytes
        for row in planned(Budget("64MiB", "cpu", "memory")).rows
        if not row.family.is_released
    )
    found = planned(Budget(int(least * 0.97), "cpu", headroom=0))
    assert {row.family["gradients"].name for row in found.fitting} == {RELEASED}
    assert all(row.parts == 1 for row in found.fitting)


@NEEDS_COMPILER
@pytest.mark.long
def test_states_on_the_host_and_released_gradients_take_what_a_run_takes():
    """Where a card holds little more than the weights; on an accelerator that counts bytes."""

    def given() -> dict[str, Any]:
        callbacks = [ActivationCheckpointing("full"), OptimizerOffload()]
        return {"plugins": PureBF16Precision("split", "exact"), "callbacks": callbacks}

    found = plan(Deep(), deep_batch(16), Budget("1GiB", "rtx4090", "memory"), trainer=given())
    (row,) = (row for row in found.fitting if row.family.is_released)
    assert row.prediction is not None
    kwargs = found.trainer_kwargs(row)
    assert [type(one) for one in kwargs["callbacks"]] == [
        ActivationCheckpointing,
        OptimizerOffload,
        GradientRelease,
    ]
    peak, pinned = measured(Deep(), 16, **kwargs)
    assert row.prediction.peak_bytes == pytest.approx(peak, abs=SCALARS)
    assert row.prediction.host_bytes == pinned


class Clipping(Language):
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        pass


class Sparse(Language):
    def __init__(self) -> None:
        super().__init__(layers=2)
        self.table = nn.Embedding(4, 4, sparse=True)


@pytest.mark.parametrize(
    ("module", "given", "said"),
    [
        (Language, {"accumulate_grad_batches": 4}, "accumulate_grad_batches=4: released gradients can't"),
        (Clipping, {}, "Clipping.configure_gradient_clipping clips after backward"),
        (Sparse, {}, "table has sparse=True"),
        (Language, {"callbacks": [MemoryBudget("64MiB", 2)]}, "the trial step of the MemoryBudget"),
    ],
)
@pytest.mark.long
def test_what_release_can_not_go_with_is_said_and_not_planned(module, given, said):
    given = {"precision": "32-true", **given}
    given["callbacks"] = [ActivationCheckpointing("full"), *given.get("callbacks", [])]
    found = plan(module, batch(ROWS, LENGTH), Budget("64MiB", "cpu", "memory"), trainer=given)
    assert found.fitting
    assert not any(row.family.is_released for row in found.rows)
    assert said in found.unavailable["gradients"]
    assert f"No choice of gradients here: {found.unavailable['gradients']}" in found.reasons()


@pytest.mark.long
def test_on_a_card_without_bfloat16_the_scaler_needs_all_gradients():
    found = plan(
        Language,
        batch(ROWS, LENGTH),
        Budget("64MiB", "t4", "memory"),
        trainer={"callbacks": [ActivationCheckpointing("full"), OptimizerOffload()]},
    )
    reasons = {row.family["precision"].name: row.rejected for row in found.rows if row.family.is_released}
    assert "float16's scaler" in reasons["mixed float16"]
    given = {"precision": "16-mixed", "callbacks": [ActivationCheckpointing("full"), OptimizerOffload()]}
    found = plan(Language, batch(ROWS, LENGTH), Budget("64MiB", "t4", "memory"), trainer=given)
    assert "the scaler of float16" in found.unavailable["gradients"]


@pytest.mark.long
def test_ranks_that_share_weights_may_release_their_gradients():
    callbacks = [ActivationCheckpointing("full"), ActivationOffload()]
    given = {"devices": 4, "plugins": PureBF16Precision(), "callbacks": callbacks}
    found = plan(Language, batch(1, LENGTH), Budget("1GiB", "a100-40gb", "memory"), trainer=given)
    by_ranks: dict[str, set[bool]] = {}
    for row in found.fitting:
        by_ranks.setdefault(row.family["ranks"].name, set()).add(row.family.is_released)
    assert by_ranks["DDP"] == {False}
    assert True in by_ranks["FSDP2 stage 3"]
