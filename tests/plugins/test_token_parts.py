"""MemoryBudget forms parts of padded batches by tokens where the module does not look at padding."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_memkit import MemoryBudget
from tests.plugins.toys import TokenTagger, tagged_rows, trained, trainer, weights

# The toy's mean over all ids counts padding, of which narrower micro-batches have less: it is named.
pytestmark = pytest.mark.filterwarnings("ignore:What training_step logs as 'mean_x' can't be made")


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    longest = max(len(row["x"]) for row in rows)
    batch = {"x": torch.zeros(len(rows), longest, dtype=torch.int64)}
    batch["labels"] = torch.full_like(batch["x"], -100)
    batch["attention_mask"] = torch.zeros_like(batch["x"])
    for index, row in enumerate(rows):
        length = len(row["x"])
        batch["x"][index, :length], batch["labels"][index, :length] = row["x"], row["labels"]
        batch["attention_mask"][index, :length] = 1
    return batch


def uneven(count: int = 80, longest: int = 48) -> DataLoader:
    """Heavy-tailed lengths, in batches of 8 that are padded to their longest row."""
    rows = tagged_rows(count, longest)
    for index, row in enumerate(rows):
        length = longest if index % 8 == 3 else 4 + index % 7
        row["x"], row["labels"] = row["x"][:length].clone(), row["labels"][:length].clone()
        row["labels"][-1] = int(row["x"][-1])
    return DataLoader(rows, batch_size=8, collate_fn=padded)  # pyright: ignore[reportArgumentType]


LATEST: list[tuple[int, ...]] = []  # no state of a module or callback, which micro-batches would change each


class Parts(Callback):
    """The shapes of what training ran; trials run no hooks."""

    sees_micro_batches = True

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self.shapes.append(LATEST[-1])


class Causal(TokenTagger):
    """A recurrent layer never sees what comes later, so padding on the right changes nothing before it."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        LATEST.append(tuple(batch["x"].shape))
        return super().training_step(batch, batch_idx)


class LooksAtPadding(Causal):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        flipped = {"x": batch["x"].flip(1), "labels": batch["labels"].flip(1)}
        return super().training_step(flipped, batch_idx)


class Outputs(Callback):
    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        logits = outputs["logits"]
        self.logits.append(logits * batch["attention_mask"][..., None])


@pytest.mark.long
def test_parts_by_tokens_have_the_whole_batch_s_result_and_half_its_tokens() -> None:
    options: dict[str, Any] = {"module": Causal, "dtype": torch.float64, "max_steps": 8}
    before, now = Outputs(), Outputs()
    whole, _ = trained(before, data=uneven(), **options)
    ran = Parts()
    parts, _ = trained(MemoryBudget("1GiB", micro_batch_size=2), now, ran, data=uneven(), **options)
    assert torch.allclose(weights(whole), weights(parts), rtol=0, atol=1e-12)
    computed = sum(rows * columns for rows, columns in ran.shapes)
    assert 0 < computed < 0.5 * 8 * 8 * 48
    assert max(rows for rows, _ in ran.shapes) > 2
    for first, second in zip(before.logits, now.logits, strict=True):
        assert torch.allclose(first, second, rtol=0, atol=1e-12)


def test_a_module_that_looks_at_padding_is_split_by_rows(caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"module": LooksAtPadding, "dtype": torch.float64, "max_steps": 4}
    whole, _ = trained(data=uneven(), **options)
    ran = Parts()
    with caplog.at_level(logging.INFO):
        parts, _ = trained(MemoryBudget("1GiB", micro_batch_size=2), ran, data=uneven(), **options)
    assert "the module looks at padding" in caplog.text
    assert torch.allclose(weights(whole), weights(parts), rtol=0, atol=1e-12)
    assert set(ran.shapes) == {(2, 48)}


@pytest.mark.long
def test_a_larger_part_than_was_measured_to_fit_is_not_formed() -> None:
    """A budget that the rows of one part just fit, and many short rows don't: each row takes memory of its own."""

    class Hungry(Causal):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
            held = self.head.weight.new_zeros(len(batch["x"]), 200_000) + self.head.bias.sum() * 0
            output = super().training_step(batch, batch_idx)
            output["loss"] = output["loss"] + held.sum()
            return output

    budget = MemoryBudget("5MiB", micro_batch_size=2, enforce="always")
    ran = Parts()
    trained(budget, ran, module=Hungry, data=uneven(), max_steps=4)
    assert budget.retries == 0
    assert max(rows for rows, _ in ran.shapes) == 2


DRY: list[bool] = []  # whether the step is to run out of memory; here no retry puts it back


class DriesUp(Causal):
    """Runs out of memory once, in the smallest parts: from then on they are formed by rows."""

    def __init__(self, at: int | None = None) -> None:
        super().__init__()
        self.at = at

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        DRY[:] = [batch_idx == self.at]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        if any(DRY):
            DRY[:] = [len(batch["x"]) > 1]
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")
        return super().training_step(batch, batch_idx)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("at", [None, 3])
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before.*")
@pytest.mark.long
def test_a_resumed_run_forms_the_same_parts(at: int | None, tmp_path: Path) -> None:
    """Also where parts formed by tokens had run out of memory; bitwise the same weights. All batches are alike."""
    rows = [row for batch in uneven(8, longest=40) for row in zip(*batch.values(), strict=True)]
    alike: Any = 10 * [dict(zip(("x", "labels", "attention_mask"), row, strict=True)) for row in rows]
    data = DataLoader(alike, 8)
    through, after = Parts(), Parts()
    whole, _ = trained(
        MemoryBudget("1GiB", micro_batch_size=2), through, module=lambda: DriesUp(at), data=data, max_steps=8
    )
    _, fitted = trained(
        MemoryBudget("1GiB", micro_batch_size=2), module=lambda: DriesUp(at), data=data, max_steps=5
    )
    fitted.save_checkpoint(tmp_path / "at_5.ckpt")
    module = DriesUp()
    again = trainer(MemoryBudget("1GiB", micro_batch_size=2), after, max_steps=8, gradient_clip_val=0.5)
    again.fit(module, data, ckpt_path=tmp_path / "at_5.ckpt")
    assert through.shapes[-len(after.shapes) :] == after.shapes != []
    assert torch.equal(weights(whole), weights(module))


class BesideNeighbors(TokenTagger):
    """Adds the mean of each row's neighbors, of which there happen to be as many as the batch has tokens."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        LATEST.append(tuple(batch["x"].shape))
        named = batch["neighbors"] > 0
        means = (self.embedding(batch["neighbors"]) * named[..., None]).sum(1) / named.sum(1, keepdim=True)
        logits = self.head(self.mix(self.embedding(batch["x"]) + means[:, None])[0])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def with_neighbors(late: int) -> DataLoader:
    """As many neighbors as tokens at first, with zeros behind them, and in later batches as many as there is room."""
    batches = list(uneven())
    generator = torch.Generator().manual_seed(2)
    for index, batch in enumerate(batches):
        neighbors = torch.randint(1, 8, batch["x"].shape, generator=generator)
        batch["neighbors"] = neighbors * batch["attention_mask"] if index < late else neighbors
    return DataLoader(batches, batch_size=None)  # pyright: ignore[reportArgumentType]


@pytest.mark.long
def test_what_is_as_wide_as_the_tokens_by_chance_is_never_cut_where_it_holds_something() -> None:
    """In ten batches its cut columns were zeros; later ones lost neighbors without a word."""
    options: dict[str, Any] = {"module": BesideNeighbors, "dtype": torch.float64, "max_steps": 10}
    whole, _ = trained(data=with_neighbors(6), **options)
    ran = Parts()
    parts, _ = trained(MemoryBudget("1GiB", micro_batch_size=2), ran, data=with_neighbors(6), **options)
    assert torch.allclose(weights(whole), weights(parts), rtol=0, atol=1e-12)
    assert any(columns < 48 for _, columns in ran.shapes)
    assert set(ran.shapes[-4:]) == {(2, 48)}
