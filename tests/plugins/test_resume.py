"""A resumed run repeats the size that was settled, and goes on tuning where none was."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_memkit import MemoryBudget
from lightning_memkit.micro_batching.sizes import tuning
from tests.plugins.test_history import Failing
from tests.plugins.test_token_parts import Causal, uneven
from tests.plugins.test_tuning import FASTEST_AT_8, Classifier, Clock, data
from tests.plugins.toys import trained, trainer

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:You're resuming from a checkpoint that ended before the epoch:UserWarning"
    ),
    pytest.mark.filterwarnings("ignore:What training_step logs as 'mean_x' can't be made"),
]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> type[Classifier]:
    """Parts of 8 are the fastest, by the clock that the tuning reads."""
    clock = Clock()
    monkeypatch.setattr(tuning, "perf_counter", clock)

    class Timed(Classifier):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            clock.now += len(batch[1]) * FASTEST_AT_8.get(len(batch[1]), 2.0)
            return super().training_step(batch, batch_idx)

    return Timed


def resumed(path: Path, budget: MemoryBudget, module: Any, loader: Any, max_steps: int) -> MemoryBudget:
    again = trainer(budget, max_steps=max_steps, gradient_clip_val=0.5)
    again.fit(module, loader, ckpt_path=path)
    return budget


def test_a_run_that_ended_while_sizes_were_timed_goes_on_timing_the_same(
    timed: type[Classifier],
    tmp_path: Path,
) -> None:
    first = MemoryBudget("1GiB")
    _, fitted = trained(first, module=timed, data=data(), max_steps=9)
    path = tmp_path / "under way.ckpt"
    fitted.save_checkpoint(path)
    state = torch.load(path)["callbacks"]["MemoryBudget"]
    assert (state["micro_batch_size"], state["open_sizes"]) == (8, [32, 16, 8, 4, 2, 1])
    budget = resumed(path, MemoryBudget("1GiB"), timed(), data(batches=80), 70)
    assert budget.sizing is not None
    assert [trial.micro_batch_size for trial in budget.sizing.trials] == [32]
    assert {size for _, size in budget.history} >= {32, 16, 8, 4}
    assert budget.state_dict()["micro_batch_size"] == 8
    assert budget.state_dict()["open_sizes"] == []


def test_a_size_that_was_settled_is_repeated_without_the_clock(
    timed: type[Classifier],
    tmp_path: Path,
) -> None:
    first = MemoryBudget("1GiB")
    _, fitted = trained(first, module=timed, data=data(), max_steps=45)
    path = tmp_path / "settled.ckpt"
    fitted.save_checkpoint(path)
    assert torch.load(path)["callbacks"]["MemoryBudget"]["open_sizes"] == []
    budget = resumed(path, MemoryBudget("1GiB"), timed(), data(), 50)
    assert budget.history == [(45, 8)]


@pytest.mark.parametrize("larger", [[32], [32, 16]])
def test_sizes_that_ran_out_of_memory_are_not_timed_again(
    timed: type[Classifier],
    larger: list[int],
) -> None:
    budget = MemoryBudget("1GiB")
    budget.load_state_dict({"micro_batch_size": 8, "open_sizes": [32, 16, 8, 4], "larger": larger})
    trained(budget, module=timed, data=data(), max_steps=20)
    assert max(size for _, size in budget.history) == larger[-1] // 2
    assert budget.retries == 0


def test_open_sizes_that_all_ran_out_leave_the_one_in_use(timed: type[Classifier]) -> None:
    budget = MemoryBudget("1GiB")
    budget.load_state_dict({"micro_batch_size": 2, "open_sizes": [32, 16], "larger": [32, 16, 4]})
    trained(budget, module=timed, data=data(), max_steps=6)
    assert budget.history == [(0, 2)]


def test_open_sizes_that_do_not_fit_any_more_are_measured_anew(timed: type[Classifier]) -> None:
    budget = MemoryBudget("100KiB")
    budget.load_state_dict({"micro_batch_size": 8, "open_sizes": [1024, 512]})
    with pytest.warns(
        UserWarning, match="micro-batch of 1024 does not fit this budget; another one is measured"
    ):
        trained(budget, module=timed, data=data(1024, 6), max_steps=6)
    assert budget.sizing is not None
    assert budget.sizing.micro_batch_size < 1024


@pytest.mark.long
def test_parts_that_are_formed_by_rows_since_an_oom_stay_so(tmp_path: Path) -> None:
    def by_itself() -> Failing:
        budget = Failing(1, at=99)
        budget.micro_batch_size = "auto"  # else what the user says holds
        return budget

    path = tmp_path / "by rows.ckpt"
    faulty = Failing(1, at=2)
    _, fitted = trained(faulty, module=Causal, data=uneven(), max_steps=4)
    fitted.save_checkpoint(path)
    assert faulty.history[-1].row_tokens is None
    again = resumed(path, by_itself(), Causal(), uneven(), 6)
    assert [(*change, change.row_tokens) for change in again.history] == [(4, 1, None)]
    sound = Failing(1, at=99)
    _, fitted = trained(sound, module=Causal, data=uneven(), max_steps=4)
    fitted.save_checkpoint(path)
    again = resumed(path, by_itself(), Causal(), uneven(), 6)
    assert [(*change, change.row_tokens) for change in again.history] == [(4, 1, 48)]
