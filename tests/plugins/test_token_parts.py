"""MemoryBudget forms parts of padded batches by tokens where the module does not look at padding."""

import logging
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_memkit import MemoryBudget
from tests.plugins.toys import TokenTagger, tagged_rows, trained, weights


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


class Causal(TokenTagger):
    """A recurrent layer never sees what comes later, so padding on the right changes nothing before it."""

    shapes: list[tuple[int, ...]]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        if torch.is_grad_enabled():
            self.shapes = [*getattr(self, "shapes", []), tuple(batch["x"].shape)]
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


def test_parts_by_tokens_have_the_whole_batch_s_result_and_half_its_tokens() -> None:
    options: dict[str, Any] = {"module": Causal, "dtype": torch.float64, "max_steps": 8}
    before, now = Outputs(), Outputs()
    whole, _ = trained(before, data=uneven(), **options)
    parts, _ = trained(MemoryBudget("1GiB", micro_batch_size=2), now, data=uneven(), **options)
    assert torch.allclose(weights(whole), weights(parts), rtol=0, atol=1e-12)
    assert isinstance(parts, Causal)
    computed = sum(rows * columns for rows, columns in parts.shapes)
    assert computed < 0.5 * 8 * 8 * 48
    assert max(rows for rows, _ in parts.shapes) > 2
    for first, second in zip(before.logits, now.logits, strict=True):
        assert torch.allclose(first, second, rtol=0, atol=1e-12)


def test_a_module_that_looks_at_padding_is_split_by_rows(caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"module": LooksAtPadding, "dtype": torch.float64, "max_steps": 4}
    whole, _ = trained(data=uneven(), **options)
    with caplog.at_level(logging.INFO):
        parts, _ = trained(MemoryBudget("1GiB", micro_batch_size=2), data=uneven(), **options)
    assert "the module looks at padding" in caplog.text
    assert torch.allclose(weights(whole), weights(parts), rtol=0, atol=1e-12)
    assert isinstance(parts, Causal)
    assert set(parts.shapes) == {(2, 48)}


def test_a_larger_part_than_was_measured_to_fit_is_not_formed() -> None:
    """A budget that the rows of one part just fit, and many short rows don't: each row takes memory of its own."""

    class Hungry(Causal):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
            held = self.head.weight.new_zeros(len(batch["x"]), 200_000) + self.head.bias.sum() * 0
            output = super().training_step(batch, batch_idx)
            output["loss"] = output["loss"] + held.sum()
            return output

    budget = MemoryBudget("5MiB", micro_batch_size=2, enforce="always")
    parts, _ = trained(budget, module=Hungry, data=uneven(), max_steps=4)
    assert budget.retries == 0
    assert isinstance(parts, Causal)
    assert max(rows for rows, _ in parts.shapes) == 2
