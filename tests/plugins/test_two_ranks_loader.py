"""Two gloo ranks of different speed come to one plan, and resume within an epoch with every sample once."""

import json
from pathlib import Path

from tests.processes import run_on_ranks


def test_ranks_take_one_plan_and_their_own_samples(tmp_path: Path) -> None:
    done = run_on_ranks("tests.plugins.two_ranks_loader", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    for rank in ranks:
        assert rank["first"]["used"] == [0] * 12 + [3] * 8
        assert rank["resumed"]["used"] == [3] * 12
    seen = [rank["first"]["seen"] + rank["resumed"]["seen"] for rank in ranks]
    assert sorted(seen[0] + seen[1]) == [float(sample) for sample in range(128)]
