"""Two gloo ranks, one of which has a batch that can't be split where the other's batch shows something new."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_what_one_rank_finds_new_is_not_probed_where_the_other_ranks_batch_can_not_be_split(
    strategy: str,
) -> None:
    """The other rank was asked for its batch's rows, and training ended with a SplitError; FSDP2's ranks hung."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone",
               "-m", "tests.plugins.two_ranks_misfits", strategy]  # fmt: skip
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    found = dict(line.split() for line in done.stdout.splitlines() if line.startswith("differs_"))
    assert len(found) == 3
    assert max(map(float, found.values())) <= 1e-12
