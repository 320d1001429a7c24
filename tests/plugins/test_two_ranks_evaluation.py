import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.parametrize(("strategy", "size"), [("ddp", "3"), ("fsdp2", "3"), ("fsdp2", "auto")])
def test_ranks_validate_in_parts_with_the_whole_batches_values(
    tmp_path: Path, strategy: str, size: str
) -> None:
    """Under DDP the ranks' batches are unequal in size and number; under FSDP2 every forward is a collective."""
    path = tmp_path / "results.pt"
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone",
               "-m", "tests.plugins.two_ranks_evaluation", str(path), strategy, size]  # fmt: skip
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    (whole, sizes), (parts, split_sizes) = torch.load(path)
    assert parts[0] == pytest.approx(whole[0], rel=1e-12)
    assert min(sizes) >= 7
    assert max(split_sizes[-4:]) <= 3
