"""Two ranks with batches of unlike sizes, and losses that are not known to split, or do not."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.plugins.ranks_unlike import LOSSES, Batches, Rows
from tests.plugins.toys import trainer, weights
from tests.processes import run_on_ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank has found."""
    path = tmp_path_factory.mktemp("ranks") / "found.pt"
    done = run_on_ranks("tests.plugins.ranks_unlike", str(path), limit=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(f"{path}.{rank}") for rank in (0, 1)]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.long
def test_a_loss_that_is_not_split_weighs_as_under_ddp_alone(loss: str, found: list[Any]) -> None:
    (plain, ours), (_, other) = (of_rank[loss] for of_rank in found)
    assert torch.equal(ours, other)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-13)


def test_rows_that_act_on_each_other_among_many_are_refused_on_all_ranks(found: list[Any]) -> None:
    for of_rank in found:
        assert "act on each other where there are many" in of_rank["hardest"]


def test_a_term_that_only_one_ranks_whole_batch_has_is_refused_on_all_ranks(found: list[Any]) -> None:
    """The other rank waited for the first one."""
    for of_rank in found:
        assert isinstance(of_rank["more"], str), of_rank["more"]


def test_a_mean_a_sum_and_a_penalty_each_add_up_in_their_own_way(found: list[Any]) -> None:
    """The mean is over all ranks' rows; sums are averaged over ranks, as DDP's gradients are."""

    def of_both(toy: Rows, out: Tensor, y: Tensor) -> Tensor:
        penalty = torch.stack([weight.square().sum() for weight in toy.net.parameters()]).sum()
        return (out - y).square().mean() + 0.01 * out.square().sum() / 2 + 0.1 * penalty

    torch.manual_seed(0)
    toy, ranks = Rows(of_both).double(), [Batches(rank) for rank in (0, 1)]
    pairs = [zip(*of_step, strict=True) for of_step in zip(*ranks, strict=True)]
    joined: Any = [tuple(torch.cat(parts) for parts in pair) for pair in pairs]
    trainer(max_epochs=1, max_steps=-1).fit(toy, DataLoader(joined, batch_size=None))
    for of_rank in found:
        assert isinstance(of_rank["penalty"], Tensor), of_rank["penalty"]
        torch.testing.assert_close(of_rank["penalty"], weights(toy), rtol=1e-12, atol=1e-13)
