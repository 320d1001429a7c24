import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule

from tests.plugins.toys import (
    GrowingTagger,
    MaskedTagger,
    OpaqueTagger,
    ShardableTagger,
    SparseTagger,
    WeightedTagger,
    loader,
    trained,
    weights,
)


def run_on_two_ranks(path: Path, micro_batch_size: int, strategy: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone",
               "-m", "tests.plugins.two_ranks", str(path), str(micro_batch_size), strategy]  # fmt: skip
    return subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=240)


def two_ranks(path: Path, micro_batch_size: int, strategy: str) -> dict[str, torch.Tensor]:
    done = run_on_two_ranks(path, micro_batch_size, strategy)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(path)


@pytest.mark.parametrize(("strategy", "micro_batch_size"), [("ddp", 3), ("fsdp2", 3), ("ddp", 0)])
def test_parts_weigh_over_all_ranks(tmp_path: Path, strategy: str, micro_batch_size: int) -> None:
    """Two gloo ranks in parts are one process with the whole batch; plain DDP (0) is the control that is not."""
    whole, _ = trained(dtype=torch.float64, max_steps=10, data=loader(count=80), module=ShardableTagger)
    ranks = two_ranks(tmp_path / "weights.pt", micro_batch_size, strategy)
    difference = float((ranks["weights"] - weights(whole)).abs().max())
    assert float(ranks["spread"]) == 0
    assert (difference <= 1e-12) if micro_batch_size else (difference >= 1e-3)


@pytest.mark.parametrize(
    ("strategy", "module"),
    [
        (f"{strategy} {loss}", module)
        for strategy in ("ddp", "fsdp2")
        for loss, module in (
            ("weighted", WeightedTagger),
            ("masked", MaskedTagger),
            ("growing", GrowingTagger),
            ("sparse", SparseTagger),
            ("opaque", OpaqueTagger),
        )
    ],
)
def test_what_a_loss_shows_weighs_over_all_ranks(
    tmp_path: Path, strategy: str, module: type[LightningModule]
) -> None:
    """Also from the step on at which it is divided by another number than before, or has more terms on one rank."""
    whole, _ = trained(dtype=torch.float64, max_steps=10, data=loader(count=80), module=module)
    ranks = two_ranks(tmp_path / "weights.pt", 3, strategy)
    assert float(ranks["spread"]) == 0
    assert float((ranks["weights"] - weights(whole)).abs().max()) <= 1e-12


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_loss_that_has_other_terms_in_some_parts_of_one_rank_ends_both_with_a_reason(
    tmp_path: Path, strategy: str
) -> None:
    done = run_on_two_ranks(tmp_path / "weights.pt", 3, f"{strategy} ragged")
    assert done.returncode != 0
    assert done.stderr.count("BudgetError: ") == 2
    assert done.stderr.count("keep the batch whole (micro_batch_size = the loader's batch size") == 2


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_rows_that_act_on_each_other_are_refused_on_both_ranks(tmp_path: Path, strategy: str) -> None:
    done = run_on_two_ranks(tmp_path / "weights.pt", 3, f"{strategy} contrastive")
    assert done.returncode != 0
    assert done.stderr.count("BudgetError: ") == 2
