"""Blocks are found and sharded, and a step on two ranks is the step of one process with both batches."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_memkit.distributed.sharding import Sharding, shard_blocks
from tests.distributed.launch import two_ranks
from tests.distributed.two_ranks_sharding import Net, stepped


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    return two_ranks("two_ranks_sharding", tmp_path_factory.mktemp("sharding"))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_sharded_step_is_the_whole_step(stage: int, ranks: dict[Any, Any]) -> None:
    found = ranks[stage]
    assert found["names"] == ["blocks.0", "blocks.1", "blocks.2"]
    assert found["gathered after the forward"] == (stage == 2)
    whole = stepped(Net(), torch.cat([torch.full((4, 8), rank + 1.0) for rank in (0, 1)]))
    for name, value in whole.items():
        torch.testing.assert_close(found["weights"][name], value, rtol=1e-5, atol=1e-7)
    assert found["elements"] < 0.6 * sum(value.numel() for value in whole.values())


def test_no_blocks_are_said(ranks: dict[Any, Any]) -> None:
    assert any(
        "no repeated blocks, so all its weights are gathered at once" in one for one in ranks["warnings"]
    )


def test_a_mesh_that_splits_tensors_is_refused() -> None:
    class Mesh:
        ndim = 2
        mesh_dim_names = ("data_parallel", "tensor_parallel")

    with pytest.raises(
        ValueError, match=r'The mesh has 2 dimensions; give one of them: mesh\["data_parallel"\]'
    ):
        shard_blocks(nn.Linear(2, 2), Mesh())  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="stage='3'"):
        Sharding(stage="3")  # pyright: ignore[reportArgumentType]
