"""Which rows of a sweep and which long tests a run of the suite takes; `make slow` runs the others."""

import shutil
import subprocess
import zlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

# Its multiples fall in step with no parameter: with every third row, one of three optimizers would never run.
GOLDEN = 0.618034
TURNS = 4


def turn_of(folder: Path) -> int:
    """Tell which quarter of the long tests is this commit's: by its hash, 0 where there is none to read."""
    git = shutil.which("git")
    if git is None:
        return 0
    read = subprocess.run([git, "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=False)
    return int(read.stdout[:8], 16) % TURNS if read.returncode == 0 else 0


def leave_out(items: Iterable[pytest.Item], turn: int) -> None:
    """Mark as slow what is not in the sample: rows of `sampled` tests, and `long` tests of other turns."""
    rows = Counter[str]()
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled is not None:
            test = item.nodeid.partition("[")[0]
            if rows[test] * GOLDEN % 1 >= 1 / sampled.args[0]:
                item.add_marker(pytest.mark.slow)
            rows[test] += 1
        if item.get_closest_marker("long") is not None and zlib.crc32(item.nodeid.encode()) % TURNS != turn:
            item.add_marker(pytest.mark.slow)
