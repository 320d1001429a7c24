"""CONTRIBUTING.md names commands and files that there are."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
NO_FILES = (".venv/", "benchmarks/results/NAME-")
FOUND = set(re.findall(r"(?:`|\]\(|\s)((?:[\w.-]+/)+[\w-]+\.\w+)", PAGE))
FILES = sorted(path for path in FOUND if not path.startswith(NO_FILES))
ROOMS = sorted(path.parent.name for path in (ROOT / "tests").glob("*/__init__.py"))
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


def made(*words: str) -> subprocess.CompletedProcess[str]:
    # As from a shell, not from the `make` that may run these tests.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "--no-print-directory", *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("path", FILES)
def test_a_file_that_the_page_names_exists(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("target", sorted(set(re.findall(r"`make (?:--[\w-]+ )?(\w+)`", PAGE))))
def test_a_target_of_make_that_the_page_names_exists(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("name", ["optims", "optim loss", "%", "../optim"])
def test_a_room_that_is_not_there_fails_and_names_those_that_are(name: str) -> None:
    done = made("test", f"ROOM={name}")
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == f"ROOM={name} is no room of tests/; there are: {' '.join(ROOMS)}"


def test_a_room_is_linted_and_its_tests_alone_are_run() -> None:
    shown = made("--dry-run", "test", "ROOM=optim", "K=kahan or split").stdout
    assert "ruff check" in shown
    assert '-m "not slow" tests/optim -k "kahan or split"' in shown
    assert "pyright" not in shown
    assert "mkdocs" not in shown


def test_without_a_room_everything_is_run() -> None:
    shown = made("--dry-run", "test").stdout
    assert all(
        tool in shown for tool in ("ruff format --check", "pyright", "mkdocs build --strict", "-m pytest")
    )
