import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.plugins.toys import ShardableTagger, WeightedTagger, loader, trained, weights


def two_ranks(path: Path, micro_batch_size: int, strategy: str) -> dict[str, torch.Tensor]:
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone",
               "-m", "tests.plugins.two_ranks", str(path), str(micro_batch_size), strategy]  # fmt: skip
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=240)
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


def test_class_weights_weigh_over_all_ranks(tmp_path: Path) -> None:
    whole, _ = trained(dtype=torch.float64, max_steps=10, data=loader(count=80), module=WeightedTagger)
    ranks = two_ranks(tmp_path / "weights.pt", 3, "ddp weighted")
    assert float(ranks["spread"]) == 0
    assert float((ranks["weights"] - weights(whole)).abs().max()) <= 1e-12
