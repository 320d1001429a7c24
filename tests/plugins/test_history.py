"""The history of a run's partitions: a fault-free run that follows it takes the same steps, bit for bit."""

import copy
import json
import pickle
from typing import Any

import pytest
import torch

from lightning_memkit import MemoryBudget
from lightning_memkit.micro_batching.history import WHOLE, PartsChange, in_force, noted
from tests.plugins.test_token_parts import Causal, Parts, uneven
from tests.plugins.toys import loader, trained, weights

pytestmark = pytest.mark.filterwarnings("ignore:What training_step logs as 'mean_x' can't be made")


class Failing(MemoryBudget):
    """Runs out of memory once, in the batch of that index."""

    def __init__(self, size: int, at: int, **options: Any) -> None:
        super().__init__("1GiB", micro_batch_size=size, **options)
        self.at, self.failed = at, False

    def run(self, step: Any) -> Any:
        result = super().run(step)
        if step.batch_idx == self.at and not self.failed:
            self.failed = True
            raise torch.OutOfMemoryError("the device is full")
        return result


class Replaying(MemoryBudget):
    """Splits as another run's history says."""

    def __init__(self, history: list[PartsChange], **options: Any) -> None:
        super().__init__("1GiB", micro_batch_size=1, recover=False, **options)
        self.given = history

    def prepare(self, step: Any) -> None:
        super().prepare(step)
        then, partition = in_force(self.given, step.trainer.global_step, step.batch_idx), self.partition
        partition.resize(then.micro_batch_size)
        if then.row_tokens is None:
            partition.form_by_rows()
        else:
            partition.form_by_tokens(then.row_tokens, partition.wide)

    @property
    def partition(self) -> Any:
        assert self._engine is not None
        return self._engine.runner.partition


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("size", "expected"),
    [(1, [(0, 1, 48), (4, 1, None)]), (2, [(0, 2, 48), (4, 1, 48)])],
)
@pytest.mark.long
def test_a_run_whose_parts_are_formed_by_tokens_is_repeated_from_its_history(
    size: int, expected: list[Any]
) -> None:
    """The smallest parts by tokens that run out of memory are formed by rows, with the size as it was."""
    options: dict[str, Any] = {"module": Causal, "max_steps": 7, "dtype": torch.float32}
    faulty = Failing(size, at=4)
    before, after = Parts(), Parts()
    module, _ = trained(faulty, before, data=uneven(), **options)
    assert [(*change, change.row_tokens) for change in faulty.history] == expected
    again, _ = trained(Replaying(faulty.history), after, data=uneven(), **options)
    assert torch.equal(weights(module), weights(again))
    assert after.shapes[-10:] == before.shapes[-10:]
    others = [PartsChange(*change) for change in faulty.history]  # without the tokens
    other, _ = trained(Replaying(others), data=uneven(), **options)
    assert not torch.equal(weights(module), weights(other))


@pytest.mark.long
def test_a_change_within_an_accumulation_window_tells_its_batch() -> None:
    options: dict[str, Any] = {"max_steps": 3}
    faulty = Failing(4, at=3, effective_batch_size=16)
    module, _ = trained(faulty, data=loader(8), **options)
    assert faulty.history == [(0, 4), (1, 2)]
    assert faulty.history[1].batch_idx == 3
    again, _ = trained(Replaying(faulty.history, effective_batch_size=16), data=loader(8), **options)
    assert torch.equal(weights(module), weights(again))


def test_changes_are_the_tuples_that_they_were() -> None:
    change = PartsChange(3, 8, 48, 6)
    step, size = change
    assert (step, size) == (3, 8) == change
    assert json.dumps([change]) == "[[3, 8]]"
    assert repr([change]) == "[(3, 8, row_tokens=48)]"
    assert repr([PartsChange(0, WHOLE, chunk_rows=2)]) == "[(0, whole, chunk_rows=2)]"
    for same in (copy.deepcopy(change), pickle.loads(pickle.dumps(change))):
        assert (same, same.row_tokens, same.batch_idx) == (change, 48, 6)


def test_only_changes_are_noted_and_the_last_before_a_batch_is_in_force() -> None:
    history: list[PartsChange] = []
    for change in (PartsChange(0, 8), PartsChange(1, 8), PartsChange(2, 8, 48), PartsChange(2, 4, 48, 5)):
        noted(history, change)
    assert history == [(0, 8), (2, 8), (2, 4)]
    assert in_force(history, 1) is history[0]
    assert in_force(history, 2, 4) is history[1]
    assert in_force(history, 9) is history[2]
    with pytest.raises(ValueError, match="global_step=-1 lies before the history, which begins at 0"):
        in_force(history, -1)
