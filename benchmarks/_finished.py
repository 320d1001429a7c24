"""The finished cells of a sweep of hours: a run that was stopped goes on from them where the code is the same."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import git_state, installed_versions

FOLDER = Path(__file__).resolve().parent / "unfinished"


class FinishedCells:
    """Results by cell, each in a file as soon as it is there.

    Args:
        sweep: name of the sweep, with what its cells do not say of themselves (the seed).
        code: files and folders whose committed content decides the results. Where they differ from the commit, or
            outside git, nothing is kept.
        folder: of the files, one for each state of the code.
    """

    def __init__(self, sweep: str, code: Sequence[str], folder: Path = FOLDER) -> None:
        self._path: Path | None = None
        self.found: dict[str, Any] = {}
        state = git_state(code)
        if state is None:
            return
        key = hashlib.sha256(json.dumps([state, installed_versions()]).encode()).hexdigest()
        self._path = folder / f"{sweep}-{key[:12]}.jsonl"
        if self._path.exists():
            whole, _, _ = self._path.read_text(encoding="utf-8").rpartition(
                "\n"
            )  # the rest was cut off by a kill
            self.found = dict(map(json.loads, whole.splitlines()))
            self._path.write_text(f"{whole}\n" if whole else "", encoding="utf-8")

    def add(self, cell: str, result: Any) -> None:
        """Keep a cell's result, plain data."""
        if self._path is None:
            return
        self._path.parent.mkdir(exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([cell, result]) + "\n")

    def forget(self) -> None:
        """Delete the file: the sweep has ended."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
