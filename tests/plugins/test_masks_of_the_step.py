"""Masks that the step computes, which keep every row of the first batches and drop some of later ones."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.plugins.test_unlike_batches import assert_same

LATE = 3


def with_depth(index: int, batch: dict[str, Tensor], generator: torch.Generator) -> Any:
    depth = 9 * torch.rand(len(batch["y"]), generator=generator, dtype=torch.float64)
    if index >= LATE:
        depth[::3] += 10
    return {**batch, "depth": depth}


def clamped(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    mask = (batch["depth"] < 10).double()
    errors = (net(batch["x"])[:, 0] - batch["depth"] / 10).square()
    return (errors * mask).sum() / mask.sum().clamp(min=1)


def by_python(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    mask = batch["depth"] < 10
    errors = (net(batch["x"])[:, 0] - batch["depth"] / 10).square()
    return errors[mask].sum() / max(int(mask.sum()), 1)


def beside_another(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return clamped(net, batch) + F.cross_entropy(net(batch["x"]), batch["y"])


def hinge(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A row beyond its margin has no loss, and counts."""
    return F.relu(0.2 - net(batch["x"])[:, 0]).sum() / len(batch["y"])


@pytest.mark.parametrize("loss", [clamped, by_python, beside_another, hinge])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.long
def test_rows_that_a_later_mask_drops_count_nothing(loss: Any, size: int) -> None:
    """In micro-batches of one row the number of rows was believed to be what is counted."""
    assert_same(loss, with_depth, micro_batch_size=size)
