"""The clock of these tests is advanced by the module, by what a part of so many samples shall cost."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_memkit import MemoryBudget, PureBF16Precision
from lightning_memkit.micro_batching.proof.trials import Trials
from lightning_memkit.micro_batching.sizes import tuned_sizes, tuning
from lightning_memkit.utilities import cached_answers
from tests.plugins.toys import trained, weights

FASTEST_AT_8 = {32: 1.5, 16: 1.2, 8: 1.0, 4: 1.3, 2: 2.0, 1: 3.0}


class Clock:
    now = 0.0
    rows = 0  # of the latest step

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cached_answers, "cache_folder", lambda: tmp_path)
    monkeypatch.setenv("MEMKIT_TUNING_CACHE", "1")
    return tmp_path / "tuned_sizes"


class Classifier(LightningModule):
    """A mean over samples."""

    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        normalized = [nn.Unflatten(1, (4, 4)), nn.BatchNorm1d(4), nn.Flatten()] if norm else []
        self.net = nn.Sequential(nn.Linear(8, 16), *normalized, nn.Dropout(dropout), nn.Linear(16, 4))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        features, labels = batch
        return F.cross_entropy(self.net(features), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def clocked(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> type[Classifier]:
    """A module whose parts take as long as `FASTEST_AT_8` says, by the clock that the tuning reads."""
    monkeypatch.setattr(tuning, "perf_counter", clock)

    class Clocked(Classifier):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            size = len(batch[1])
            clock.rows = size
            clock.now += size * FASTEST_AT_8.get(size, 2.0)
            return super().training_step(batch, batch_idx)

    return Clocked


def data(batch_size: int = 32, batches: int = 50, dtype: torch.dtype = torch.float32) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(batches * batch_size, 8, generator=generator, dtype=dtype)
    labels = torch.randint(0, 4, (batches * batch_size,), generator=generator)
    return DataLoader(TensorDataset(features, labels), batch_size)


def difference(a: torch.nn.Module, b: torch.nn.Module) -> float:
    return float((weights(a) - weights(b)).abs().max())


def test_the_fastest_size_is_found_on_steps_that_count(clocked: type[Classifier]) -> None:
    whole, _ = trained(module=clocked, dtype=torch.float64, data=data(dtype=torch.float64), max_steps=50)
    budget = MemoryBudget("1GiB")
    parts, fitted = trained(
        budget, module=clocked, dtype=torch.float64, data=data(dtype=torch.float64), max_steps=50
    )
    assert budget.state_dict()["micro_batch_size"] == 8
    assert fitted.global_step == 50
    assert difference(whole, parts) <= 1e-12
    timed = {size for _, size in budget.history}
    assert timed == {32, 16, 8, 4, 2}
    assert budget.history[-1][0] <= 2 + 40


def test_the_history_names_the_size_of_every_step(clocked: type[Classifier], clock: Clock) -> None:
    sizes: list[int] = []

    class Parts(Callback):
        """Trials run no hooks."""

        sees_micro_batches = True

        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
            sizes.append(clock.rows)

    budget = MemoryBudget("1GiB")
    trained(budget, Parts(), module=clocked, data=data(), max_steps=30)
    recorded = dict(budget.history)
    size, parts = 0, []
    for step in range(30):
        size = recorded.get(step, size)
        parts += [size] * (32 // size)
    assert sizes == parts


def test_windows_are_timed_as_one_step(clocked: type[Classifier]) -> None:
    budget = MemoryBudget("1GiB", effective_batch_size=64)
    module, fitted = trained(budget, module=clocked, data=data(batches=60), max_steps=30)
    assert fitted.global_step == 30
    assert budget.state_dict()["micro_batch_size"] == 8
    starts = [began_at for began_at, _ in budget.history]
    assert starts == sorted(set(starts)), "a size changed within a window"


@pytest.mark.parametrize("given", [4, "resumed"])
def test_sizes_that_are_given_or_resumed_are_not_tuned(clocked: type[Classifier], given: Any) -> None:
    budget = MemoryBudget("1GiB", micro_batch_size="auto" if given == "resumed" else given)
    if given == "resumed":
        budget.load_state_dict({"micro_batch_size": 4})
    trained(budget, module=clocked, data=data(), max_steps=12)
    assert {size for _, size in budget.history} == {4}


def test_a_checkpoint_in_the_midst_keeps_the_likeliest(clocked: type[Classifier]) -> None:
    budget = MemoryBudget("1GiB")
    trained(budget, module=clocked, data=data(), max_steps=9)
    assert budget.history[-1][1] == 4  # is being timed
    assert budget.state_dict()["micro_batch_size"] == 8


def test_deterministic_runs_leave_the_clock_no_say(clocked: type[Classifier]) -> None:
    budget = MemoryBudget("1GiB")
    try:
        trained(budget, module=clocked, data=data(), max_steps=12, deterministic=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert {size for _, size in budget.history} == {32}


def test_batch_statistics_leave_the_clock_no_say(clocked: type[Classifier]) -> None:
    budget = MemoryBudget("1GiB")
    with pytest.warns(UserWarning, match="statistics of the batch"):
        trained(budget, module=lambda: clocked(norm=True), data=data(), max_steps=12)
    assert {size for _, size in budget.history} == {32}


def test_a_loss_that_does_not_add_up_is_never_split_for_speed(clocked: type[Classifier]) -> None:
    class Contrastive(clocked):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            outputs = self.net(batch[0])
            return super().training_step(batch, batch_idx) + (outputs @ outputs.T).logsumexp(1).mean()

    budget = MemoryBudget("1GiB")
    trained(budget, module=Contrastive, data=data(), max_steps=12)
    assert {size for _, size in budget.history} == {32}


def test_after_an_oom_larger_sizes_are_no_candidates(clocked: type[Classifier]) -> None:
    class FailsAbove4(clocked):
        failing = False

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if self.failing and len(batch[1]) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory (injected)")
            return super().training_step(batch, batch_idx)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.failing = batch_idx == 5

    budget = MemoryBudget("1GiB")
    _, fitted = trained(budget, module=FailsAbove4, data=data(), max_steps=35)
    assert fitted.global_step == 35
    assert budget.retries > 0
    later = {size for began_at, size in budget.history if began_at >= 5}
    assert later <= {4, 2, 1}
    assert budget.state_dict()["micro_batch_size"] == 4


@pytest.mark.parametrize(("bytes_of_16", "candidates"), [(900_000, (32, 16, 8, 4, 2, 1)), (3_000_000, (32,))])
def test_smaller_parts_that_need_wider_gradients_are_measured_before_they_are_tried(
    monkeypatch: pytest.MonkeyPatch, bytes_of_16: int, candidates: tuple[int, ...]
) -> None:
    """One part has bfloat16 gradients, several sum theirs in float32, which may not fit."""

    def peak_of(self: Trials, step: Any, batch: list[Tensor], *args: Any) -> int:
        return bytes_of_16 if len(batch[1]) == 16 else 20_000 * len(batch[1])

    monkeypatch.setattr(Trials, "peak_of", peak_of)
    budget = MemoryBudget(2_000_000)
    trained(budget, module=Classifier, data=data(), max_steps=2, plugins=[PureBF16Precision()])
    assert budget.sizing is not None
    assert budget.sizing.micro_batch_size == 32
    assert tried(budget)[-2:] == [32, 16]
    assert budget.sizing.candidates == candidates


# The cache


def run(module: Any, **options: Any) -> MemoryBudget:
    budget = MemoryBudget(options.pop("budget", "1GiB"))
    trained(budget, **{"module": module, "data": data(), "max_steps": 50, **options})
    return budget


def tried(budget: MemoryBudget) -> list[int]:
    assert budget.sizing is not None
    return [trial.micro_batch_size for trial in budget.sizing.trials]


def test_a_second_run_takes_the_answer_after_one_trial(clocked: type[Classifier], cache: Path) -> None:
    run(clocked)
    second = run(clocked)
    assert tried(second) == [8]
    assert second.history == [(0, 8)]
    (file,) = cache.iterdir()
    content = json.loads(file.read_text())
    assert content["micro_batch_size"] == 8
    speeds = {int(size): speed for size, speed in content["elements_per_second"].items()}
    assert speeds[8] / speeds[32] == pytest.approx(1.5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "changed",
    [
        {"budget": "900MiB"},
        {"data": "smaller batches"},
        *(
            pytest.param(changed, marks=pytest.mark.slow)
            for changed in (
                {"module": "dropout"},
                {"precision": "bf16-mixed"},
                {"optimizer": "foreach"},
                {"version": "another torch"},
            )
        ),
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_another_question_has_another_answer(
    clocked: type[Classifier], changed: dict[str, Any], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(clocked)

    class Foreach(clocked):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3, foreach=True)

    if "version" in changed:
        monkeypatch.setattr(tuned_sizes, "_version", lambda name: "0")
        changed = {}
    replaced = {"data": data(16), "module": lambda: clocked(dropout=0.5), "optimizer": Foreach}
    options = {
        "module" if key == "optimizer" else key: replaced.get(key, value) for key, value in changed.items()
    }
    other = run(options.pop("module", clocked), **options)
    assert len(tried(other)) > 1
    assert len(list(cache.iterdir())) == 2


@pytest.mark.long
def test_an_answer_that_no_longer_fits_is_measured_anew_and_replaced(
    clocked: type[Classifier], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(clocked)
    (file,) = cache.iterdir()

    class Grown(clocked):
        """The same by all that the question knows, but a part of more than 4 samples runs out of memory."""

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if len(batch[1]) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory (injected)")
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr(tuned_sizes, "_model", lambda module: {})
    file.rename(cache / "renamed")  # what keeps its content under this question's name is made below
    run(clocked)
    assert len(list(cache.iterdir())) == 2
    again = run(Grown)
    assert tried(again)[0] == 8
    assert len(tried(again)) <= 8
    contents = [json.loads(path.read_text()) for path in cache.iterdir() if path.name != "renamed"]
    assert [content["micro_batch_size"] for content in contents] == [again.state_dict()["micro_batch_size"]]
    assert contents[0]["micro_batch_size"] <= 4


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "content",
    [
        "{",
        '{"format": 1, "key": "another", "micro_batch_size": 1}',
        *(pytest.param(text, marks=pytest.mark.slow) for text in ("", "[]", "null", '{"format": 99}')),
    ],
)
def test_broken_and_stale_files_are_passed_over_and_replaced(
    clocked: type[Classifier], cache: Path, content: str
) -> None:
    run(clocked)
    (file,) = cache.iterdir()
    file.write_text(content)
    assert len(tried(run(clocked))) > 1
    assert json.loads(file.read_text())["micro_batch_size"] == 8
    assert list(cache.iterdir()) == [file], "a temporary file stayed behind"


@pytest.mark.long
def test_it_can_be_turned_off(
    clocked: type[Classifier], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMKIT_TUNING_CACHE", "0")
    run(clocked)
    assert not cache.exists()
    monkeypatch.delenv("MEMKIT_TUNING_CACHE")
    run(clocked)
    monkeypatch.setenv("MEMKIT_TUNING_CACHE", "0")
    assert len(tried(run(clocked))) > 1


def test_a_folder_that_cannot_be_written_to_is_warned_about(clocked: type[Classifier], cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="XDG_CACHE_HOME.*MEMKIT_TUNING_CACHE=0"):
        run(clocked)
