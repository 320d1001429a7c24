"""Tests that ask a card carry the marker; where there is none they are collected, and one line says so."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import card

FILES = sorted((Path(__file__).parent / "gpu").glob("test_*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_carries_the_marker(path: Path) -> None:
    assigned = [
        node.value
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["pytestmark"]
    ]
    assert len(assigned) == 1
    marks = assigned[0].elts if isinstance(assigned[0], ast.List) else assigned
    assert "pytest.mark.gpu" in map(ast.unparse, marks)


@pytest.mark.skipif(card._cards() > 0, reason="there is a card")
def test_without_a_card_one_line_says_so(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != card.VARIABLE}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-o", f"cache_dir={tmp_path}", str(FILES[0].parent)],
        cwd=card.ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert len(lines) == 1, lines
    assert "needs a CUDA device" in lines[0]
    skipped = re.search(r"SKIPPED \[(\d+)\]", lines[0])
    assert skipped is not None
    assert int(skipped[1]) >= len(FILES)


def test_no_card_is_no_reason_where_the_cpu_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "_cards", lambda: 0)
    monkeypatch.delenv(card.VARIABLE, raising=False)
    assert "needs a CUDA device" in str(card.why_skipped())
    monkeypatch.setenv(card.VARIABLE, "cpu")
    assert card.why_skipped() is None
    with pytest.raises(pytest.skip.Exception, match="only on CUDA: of streams"):
        card.needs_cuda("of streams")


def test_what_lacks_a_package_says_which_wheel_to_carry() -> None:
    assert card.needs_package("json") is json
    with pytest.raises(
        pytest.skip.Exception, match="No module named 'not_there'; carry not_there json: .*--wheels DIR"
    ):
        card.needs_package("not_there", "json")
