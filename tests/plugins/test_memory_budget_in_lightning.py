"""What Lightning does around a step is what it is without MemoryBudget: the same Trainer with whole batches."""

from collections import Counter
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_memkit import MemoryBudget
from lightning_memkit.memory.meter import ByteMeter
from tests.plugins.toys import ShardableTagger, TokenTagger, loader, tagged_rows, trained, weights

DOUBLE: dict[str, Any] = {"dtype": torch.float64}


def in_parts(size: int = 3, **options: Any) -> MemoryBudget:
    return MemoryBudget("1GiB", micro_batch_size=size, **options)


class Shown(TokenTagger):
    """Logs to the progress bar, on steps and epochs, with Lightning's own batch size."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.log("shown", output["loss"], prog_bar=True, on_step=True, on_epoch=True)
        means = {"a": batch["x"].float().mean(), "b": batch["labels"].clamp(0).float().mean()}
        self.log_dict(means, prog_bar=True, on_epoch=True)
        return output


class Bar(Callback):
    """What the progress bar would show after each batch."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.rows.append({name: float(value) for name, value in trainer.progress_bar_metrics.items()})

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.rows.append({name: float(value) for name, value in trainer.progress_bar_metrics.items()})


def test_the_progress_bar_shows_the_whole_batch_s_values() -> None:
    whole, parts = Bar(), Bar()
    trained(whole, module=Shown, max_steps=-1, max_epochs=2, data=loader(count=44), **DOUBLE)
    trained(in_parts(), parts, module=Shown, max_steps=-1, max_epochs=2, data=loader(count=44), **DOUBLE)
    assert len(whole.rows) == len(parts.rows) == 2 * (6 + 1)  # a last batch of 4
    for before, now in zip(whole.rows, parts.rows, strict=True):
        assert now == pytest.approx(before, rel=1e-6)


class Counts(SimpleProfiler):
    """How often each action runs."""

    def actions(self) -> Counter[str]:
        return Counter({name: len(times) for name, times in self.recorded_durations.items()})


def test_the_profiler_counts_batches_steps_and_parts() -> None:
    whole, parts = Counts(), Counts()
    trained(profiler=whole, max_steps=4)
    trained(in_parts(size=2), profiler=parts, max_steps=4)
    a_batch = {"run_training_batch", "[LightningModule]TokenTagger.optimizer_step"}
    before, now = whole.actions(), parts.actions()
    assert {name: now[name] for name in a_batch} == {name: before[name] for name in a_batch}
    step = "[Strategy]SingleDeviceStrategy.training_step"
    trials = now[step] - 4 * before[step]  # four parts a batch
    assert before[step] == 4
    # Each of four batches has values that none before it had, so in each: noise, hooks, two micro-batches alone, and
    # one after the other. In the first also rows one by one, and four times two or three rows that are most unlike,
    # of which hooks and order are known. Two peaks; two micro-batches, as one and alone, for what is logged; six steps
    # to see which changes a further step repeats.
    assert trials == 4 * 7 + 5 + 4 * 4 + 2 + 3 + 6


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.long
def test_lightning_s_accumulation_and_its_last_partial_window(accumulate: int) -> None:
    options: dict[str, Any] = {
        "max_steps": -1,
        "max_epochs": 2,
        "accumulate_grad_batches": accumulate,
        **DOUBLE,
    }
    whole, without = trained(data=loader(count=52), **options)  # 7 batches, the last of 4
    if accumulate > 1:
        with pytest.warns(UserWarning, match="weighs its batches equally"):
            parts, fitted = trained(in_parts(), data=loader(count=52), **options)
    else:
        parts, fitted = trained(in_parts(), data=loader(count=52), **options)
    assert fitted.global_step == without.global_step == 2 * -(-7 // accumulate)
    assert torch.allclose(weights(whole), weights(parts), rtol=0, atol=1e-12)
    assert fitted.lr_scheduler_configs[0].scheduler.get_last_lr() == (
        without.lr_scheduler_configs[0].scheduler.get_last_lr()
    )


@pytest.mark.long
def test_an_effective_batch_s_last_partial_window_is_weighed_by_what_it_holds() -> None:
    options: dict[str, Any] = {"max_steps": -1, "max_epochs": 2, **DOUBLE}
    whole, _ = trained(data=loader(batch_size=8, count=52), **options)
    budget = in_parts(size=1, effective_batch_size=8)
    parts, fitted = trained(budget, data=loader(batch_size=2, count=52), **options)
    assert fitted.global_step == 14
    assert torch.allclose(weights(whole), weights(parts), rtol=0, atol=1e-12)


class TwoSources(TokenTagger):
    """Its batch has one part from each of two loaders; the loss is a mean over the labels of both."""

    def training_step(self, batch: dict[str, dict[str, Tensor]], batch_idx: int) -> Any:  # pyright: ignore
        both = {key: torch.cat([batch["first"][key], batch["second"][key]]) for key in ("x", "labels")}
        return super().training_step(both, batch_idx)["loss"]


def sources(second: int) -> CombinedLoader:
    rows = tagged_rows(96)
    loaders: Any = {"first": DataLoader(rows[:48], 8), "second": DataLoader(rows[48:], second)}  # pyright: ignore
    return CombinedLoader(loaders, "min_size")


def labels_of_both(part: Any) -> float:
    return sum(int((batch["labels"] != -100).sum()) for batch in part.values())


def test_several_loaders_batches_are_split_together() -> None:
    whole, _ = trained(module=TwoSources, data=sources(8), max_steps=6, **DOUBLE)
    budget = in_parts(weigh_by=labels_of_both)
    parts, _ = trained(budget, module=TwoSources, data=sources(8), max_steps=6, **DOUBLE)
    assert torch.allclose(weights(whole), weights(parts), rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`.*")
def test_several_loaders_batches_of_unlike_sizes_run_whole_or_by_the_user_s_split() -> None:
    whole, _ = trained(module=TwoSources, data=sources(4), max_steps=6, **DOUBLE)
    with pytest.warns(UserWarning, match="disagree on the leading size"):
        same, _ = trained(MemoryBudget("1GiB"), module=TwoSources, data=sources(4), max_steps=6, **DOUBLE)
    assert torch.equal(weights(whole), weights(same))


def compiled() -> TokenTagger:
    module = ShardableTagger()
    module.mix.linear = torch.compile(module.mix.linear, backend="aot_eager")  # pyright: ignore
    return module


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor.*")  # torch's compiler looks at it
def test_compiled_submodules_train_as_uncompiled_ones() -> None:
    whole, _ = trained(module=ShardableTagger, max_steps=6, **DOUBLE)
    parts, _ = trained(in_parts(), module=compiled, max_steps=6, **DOUBLE)
    assert torch.allclose(weights(whole), weights(parts), rtol=0, atol=1e-12)


def scaled() -> MixedPrecision:
    """Gradients of float16 autocast, scaled; the scale overflows at first, so steps are skipped and it shrinks."""
    return MixedPrecision(
        "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=2)
    )


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step.*")  # the first steps are skipped
def test_a_gradient_scaler_skips_and_scales_as_without() -> None:
    first, second = scaled(), scaled()
    whole, _ = trained(module=ShardableTagger, plugins=[first], max_steps=40)
    parts, _ = trained(in_parts(), module=ShardableTagger, plugins=[second], max_steps=40)
    assert first.scaler is not None
    assert second.scaler is not None
    assert first.scaler.get_scale() == second.scaler.get_scale() < 2.0**40
    assert torch.allclose(weights(whole), weights(parts), rtol=0, atol=2e-2)  # float16
    assert not torch.equal(weights(parts), weights(trained(module=ShardableTagger, max_steps=0)[0]))


class DuringClipping(MemoryBudget):
    """Fails one allocation of what comes after backward in batch 2: unscaling, hooks, clipping."""

    def __init__(self, fail_at: int | None) -> None:
        super().__init__("1GiB", micro_batch_size=8)
        self.fail_at, self.meter = fail_at, ByteMeter(fail_at=fail_at)

    def run(self, step: Any) -> Any:
        if step.batch_idx == 2 and self.fail_at is None and self._engine is not None:
            self._engine.runner.partition.resize(4)
        return super().run(step)


class Clips(ShardableTagger):
    budget: DuringClipping

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if self.budget.fail_at is None or self.global_step != 2:
            super().configure_gradient_clipping(optimizer, *args, **kwargs)
            return
        with self.budget.meter:
            super().configure_gradient_clipping(optimizer, *args, **kwargs)


@pytest.mark.parametrize("precision", ["scaled", pytest.param("32-true", marks=pytest.mark.slow)])
@pytest.mark.long
def test_clipping_that_runs_out_of_memory_is_retried_bitwise(precision: Any) -> None:
    def run(fail_at: int | None) -> tuple[DuringClipping, Tensor]:
        options: dict[str, Any] = {"precision": precision}
        if precision == "scaled":
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
            options = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
        budget = DuringClipping(fail_at)

        def make() -> Clips:
            module = Clips()
            module.budget = budget
            return module

        return budget, weights(trained(budget, module=make, max_steps=4, **options)[0])

    counted, _ = run(10**9)
    _, reference = run(None)
    assert counted.meter.allocations > 3
    for index in range(counted.meter.allocations):
        budget, found = run(index)
        assert budget.retries == 1
        assert torch.equal(found, reference), index
