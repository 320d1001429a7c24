"""Steps and hooks that change their batch in place: micro-batches are views of it, and looks run it again."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_memkit import MemoryBudget
from tests.plugins import test_unlike_batches
from tests.plugins.test_unlike_batches import Net, assert_same, fitted
from tests.plugins.toys import weights


def as_given(index: int, batch: dict[str, Tensor], generator: torch.Generator) -> Any:
    return batch


def halved(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(net(batch["x"].div_(2)), batch["y"])


def centred(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Again is as once."""
    batch["x"] -= batch["x"].mean(1, keepdim=True)
    return F.cross_entropy(net(batch["x"]), batch["y"])


def corrupted(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Labels that are moved on: another loss each time that the batch runs."""
    batch["y"].add_(1).remainder_(4)
    return F.cross_entropy(net(batch["x"]), batch["y"])


def through_data(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """No version counter tells."""
    batch["x"].data.div_(2)
    return F.cross_entropy(net(batch["x"]), batch["y"])


@pytest.mark.parametrize("loss", [halved, centred, corrupted, through_data])
@pytest.mark.parametrize("size", [1, 3, "auto"])
@pytest.mark.long
def test_a_step_that_does_is_split(loss: Any, size: Any) -> None:
    """It was refused: "samples act on each other where there are many", as the whole batch had been changed twice."""
    assert_same(loss, as_given, micro_batch_size=size)


class Late(Net):
    """The first batch that it changes is one whose turn it is to be looked at as a whole."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx >= 7:
            batch["x"].div_(2)
        return super().training_step(batch, batch_idx)


def test_a_batch_that_is_the_first_to_be_changed_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was not copied before, so that the whole batch can't be seen as the step saw it."""
    monkeypatch.setattr(test_unlike_batches, "SIZES", (8,) * 18)
    whole = fitted(plain, as_given, kind=Late)
    split = fitted(plain, as_given, MemoryBudget("1GiB", micro_batch_size=3), kind=Late)
    torch.testing.assert_close(weights(split), weights(whole), rtol=1e-12, atol=1e-13)
    assert split.losses == pytest.approx(whole.losses, rel=1e-12)


class Hooked(Net):
    def __init__(self, loss: Any) -> None:
        super().__init__(loss)
        self.sums: list[float] = []

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        batch["x"].div_(2)
        return batch

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.sums.append(float(batch["x"].sum()))


def plain(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(net(batch["x"]), batch["y"])


@pytest.mark.parametrize("size", [1, 3])
def test_a_hook_that_does_changes_what_later_hooks_see_once(size: int) -> None:
    whole = fitted(plain, as_given, kind=Hooked)
    split = fitted(plain, as_given, MemoryBudget("1GiB", micro_batch_size=size), kind=Hooked)
    torch.testing.assert_close(weights(split), weights(whole), rtol=1e-12, atol=1e-13)
    assert split.losses == pytest.approx(whole.losses, rel=1e-12)
    assert split.sums == whole.sums
