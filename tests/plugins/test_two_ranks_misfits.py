"""Two gloo ranks, one of which has a batch that can't be split where the other's batch shows something new."""

import pytest

from tests.processes import run_on_ranks


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.long
def test_what_one_rank_finds_new_is_not_probed_where_the_other_ranks_batch_can_not_be_split(
    strategy: str,
) -> None:
    """The other rank was asked for its batch's rows, and training ended with a SplitError; FSDP2's ranks hung."""
    done = run_on_ranks("tests.plugins.two_ranks_misfits", strategy)
    assert done.returncode == 0, done.stderr[-3000:]
    found = dict(line.split() for line in done.stdout.splitlines() if line.startswith("differs_"))
    assert len(found) == 3
    assert max(map(float, found.values())) <= 1e-12
