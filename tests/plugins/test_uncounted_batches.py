"""A batch in which nothing counts, and windows of batches whose terms count unlike things."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_memkit import MemoryBudget
from lightning_memkit.micro_batching.sizes.sizing import BudgetError
from tests.plugins.toys import TokenTagger, loader, tagged_rows, trained, weights


def with_an_uncounted_batch(at: int, batch_size: int = 8) -> DataLoader:
    """The labels of one batch are all ignored."""
    rows = tagged_rows()
    for row in rows[at * batch_size : (at + 1) * batch_size]:
        row["labels"] = torch.full_like(row["labels"], -100)
    return DataLoader(rows, batch_size=batch_size)  # pyright: ignore[reportArgumentType]


class Masked(TokenTagger):
    """The mean over what a mask keeps, where at least one is kept: 0 over nothing."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # pyright: ignore
        logits = self.head(self.mix(self.embedding(batch["x"]))[0])
        losses = F.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
        return losses.sum() / (batch["labels"] != -100).sum().clamp(min=1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("kind", [TokenTagger, Masked])
def test_momentum_and_decay_go_on_where_nothing_counts(kind: type[TokenTagger], at: int) -> None:
    options: dict[str, Any] = {"module": kind, "dtype": torch.float64, "max_steps": 8}
    whole, _ = trained(data=with_an_uncounted_batch(at), **options)
    parts, _ = trained(MemoryBudget("1GiB", micro_batch_size=2), data=with_an_uncounted_batch(at), **options)
    assert torch.allclose(weights(whole), weights(parts), rtol=0, atol=1e-12)


class Unlike(TokenTagger):
    """A mean over labels, and one over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.length = nn.Linear(32, 1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # pyright: ignore
        hidden = self.mix(self.embedding(batch["x"]))[0]
        labels = F.cross_entropy(self.head(hidden).flatten(0, 1), batch["labels"].flatten())
        counted = (batch["labels"] != -100).sum(1, keepdim=True).to(hidden.dtype)
        return labels + 0.1 * (self.length(hidden.mean(1)) - counted).square().mean()


class Notes(Unlike):
    def __init__(self) -> None:
        super().__init__()
        self.newest: Any = None
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # pyright: ignore
        loss = super().training_step(batch, batch_idx)
        self.newest = loss.detach()
        self.losses.append(float(loss.detach()))
        return loss


def test_a_loss_that_a_step_notes_is_the_batch_s_where_terms_count_unlike_things() -> None:
    options: dict[str, Any] = {"module": Notes, "dtype": torch.float64, "max_steps": 8}
    whole, _ = trained(**options)
    parts, _ = trained(MemoryBudget("1GiB", micro_batch_size=3), **options)
    assert isinstance(whole, Notes)
    assert isinstance(parts, Notes)
    assert parts.losses == pytest.approx(whole.losses, rel=1e-12)
    assert float(parts.newest) == pytest.approx(float(whole.newest), rel=1e-12)


def test_several_batches_of_terms_that_count_unlike_things_are_not_weighed_as_one() -> None:
    budget = MemoryBudget("1GiB", micro_batch_size=1, effective_batch_size=8)
    with pytest.raises(
        BudgetError, match=r"effective_batch_size=8 weighs 4 loader .*accumulate_grad_batches=4"
    ):
        trained(budget, module=Unlike, data=loader(batch_size=2))


def test_a_window_of_one_batch_is_that_batch() -> None:
    options: dict[str, Any] = {"module": Unlike, "dtype": torch.float64, "max_steps": 8}
    whole, _ = trained(**options)
    parts, _ = trained(MemoryBudget("1GiB", micro_batch_size=2, effective_batch_size=8), **options)
    assert torch.allclose(weights(whole), weights(parts), rtol=0, atol=1e-12)


def test_what_is_returned_and_has_no_rows_is_named_once() -> None:
    class Returns(TokenTagger):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
            return {**super().training_step(batch, batch_idx), "shape": str(batch["x"].shape)}

    with pytest.warns(UserWarning, match=r"returns as 'shape' can't be made from") as seen:
        trained(MemoryBudget("1GiB", micro_batch_size=3), module=Returns, max_steps=4)
    assert len([warning for warning in seen if "'shape'" in str(warning.message)]) == 1
