from pathlib import Path

import pytest

from tests.distributed.launch import launched


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
