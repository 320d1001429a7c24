"""Two ranks with batches of unlike sizes, and losses that are not known to split: as under DDP alone."""

from pathlib import Path

import torch

from tests.plugins.ranks_unlike import LOSSES
from tests.processes import run_on_ranks


def test_a_loss_that_is_not_split_weighs_as_without_micro_batches(tmp_path: Path) -> None:
    path = tmp_path / "found.pt"
    done = run_on_ranks("tests.plugins.ranks_unlike", str(path), limit=240)
    assert done.returncode == 0, done.stderr[-3000:]
    zero, one = (torch.load(f"{path}.{rank}") for rank in (0, 1))
    for loss in LOSSES:
        (plain, ours), (_, other) = zero[loss], one[loss]
        assert torch.equal(ours, other)
        torch.testing.assert_close(
            ours, plain, rtol=1e-12, atol=1e-13, msg=lambda text, loss=loss: f"{loss}: {text}"
        )
