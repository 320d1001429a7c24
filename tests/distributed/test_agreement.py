import re
from pathlib import Path

import pytest

from tests.distributed.launch import launched, two_ranks
from tests.distributed.two_ranks_stalled import SECONDS


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("says so", "PeerEndedError: Rank 1 ended with an error that can't be retried"),
        ("just dies", "RuntimeError: "),
        ("is not listened to", "nothing"),
    ],
)
def test_a_rank_that_ends_ends_its_peers(tmp_path: Path, how: str, told: str) -> None:
    """The launch's own limit is what a hang would run into."""
    path = tmp_path / "told.txt"
    done = launched("two_ranks_ending", str(path), how)
    assert done.returncode == 0, done.stderr[-3000:]
    assert path.read_text().startswith(told)


@pytest.mark.long
def test_a_rank_that_stands_still_is_waited_for_as_long_as_the_strategy_says(tmp_path: Path) -> None:
    """Every group that we make or have made has the default group's timeout, not torch's 30 minutes."""
    found = two_ranks("two_ranks_stalled", tmp_path)
    assert set(found["timeouts"]) == {SECONDS}
    told = r"Rank 0 waited \d+ s for another rank while the ranks agreed on how a step went"
    assert re.search(told, found["told"])
    assert "RankTimeoutError" in found["told"]
    assert "timeout=timedelta(" in found["told"]
    # It has taken its leave as well; bounds that only torch's 30 minutes exceed, however slow the machine is.
    assert SECONDS * 0.9 <= found["waited"] <= found["ended"] <= 20 * SECONDS
