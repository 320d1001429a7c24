"""Two ranks with batches of unlike sizes, and losses that are not known to split, or do not."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.plugins.ranks_unlike import LOSSES
from tests.processes import run_on_ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank has found."""
    path = tmp_path_factory.mktemp("ranks") / "found.pt"
    done = run_on_ranks("tests.plugins.ranks_unlike", str(path), limit=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(f"{path}.{rank}") for rank in (0, 1)]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_that_is_not_split_weighs_as_under_ddp_alone(loss: str, found: list[Any]) -> None:
    (plain, ours), (_, other) = (of_rank[loss] for of_rank in found)
    assert torch.equal(ours, other)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-13)


def test_rows_that_act_on_each_other_among_many_are_refused_on_all_ranks(found: list[Any]) -> None:
    for of_rank in found:
        assert "act on each other where there are many" in of_rank["hardest"]


def test_a_mean_a_sum_and_a_penalty_are_not(found: list[Any]) -> None:
    assert isinstance(found[0]["penalty"], Tensor), found[0]["penalty"]
    assert torch.equal(found[0]["penalty"], found[1]["penalty"])
