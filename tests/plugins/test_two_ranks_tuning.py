"""Two gloo ranks whose clocks disagree ask for the same sizes, and take rank 0's answer in the next run."""

import json
from pathlib import Path

import pytest

from tests.processes import run_on_ranks


@pytest.mark.long
def test_ranks_agree_on_the_size_that_is_fastest_for_the_slower_of_them(tmp_path: Path) -> None:
    done = run_on_ranks("tests.plugins.two_ranks_tuning", str(tmp_path), env={"MEMKIT_TUNING_CACHE": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    zero, one = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert zero == one
    tuned, again = zero
    assert {size for _, size in tuned["history"]} >= {32, 16, 8}
    assert tuned["history"][-1][1] == 16
    assert again["tried"] == [16]
    assert again["history"] == [[0, 16]]
    assert len(list((tmp_path / "cache 0" / "tuned_sizes").iterdir())) == 1
    assert not (tmp_path / "cache 1").exists()
