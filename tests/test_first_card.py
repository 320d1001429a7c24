"""The script for the first minutes on a card: each stage starts here, and what needs a card says so in one line."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks._gpu_schedule import ORDER, jobs_of
from benchmarks.harness import Options

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "first_card.sh"
NEEDS_A_CARD = ("facts", "sanitizer", "quick", "full-1", "full-2", "full-3", "suite-visible")
NINE_MINUTES = 540
BEFORE_ITS_LIMIT = 15  # seconds that the script leaves the benchmarks' command to end by itself

no_card = pytest.mark.skipif(torch.cuda.is_available(), reason="this is about machines without a card")


def first_card(*arguments: str) -> Any:
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        env={**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@no_card
def test_stages_that_need_a_card_are_skipped_with_one_line_each(tmp_path: Path) -> None:
    done = first_card("--dry-run", "--results", str(tmp_path), *NEEDS_A_CARD)
    assert done.returncode == 0, done.stdout + done.stderr
    for stage in NEEDS_A_CARD:
        assert done.stdout.count(f"{stage}: skipped, ") == 2  # why, and how it ended
    assert not (tmp_path / "stages.jsonl").exists()  # a dry run verifies nothing


@pytest.mark.slow
@no_card
def test_every_stage_of_a_dry_run_starts(tmp_path: Path) -> None:
    done = first_card("--dry-run", "--results", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\n== ") + done.stdout.startswith("== ") == 10
    assert "modules imported, 0 lack an optional package, 0 failed" in done.stdout
    assert "correctness: passed" in done.stdout
    assert "suite-hidden: passed" in done.stdout


def number(name: str) -> int:
    """A number that the script sets at its top."""
    found = re.search(rf"\b{name}=(\d+)", SCRIPT.read_text(encoding="utf-8"))
    assert found is not None
    return int(found[1])


def test_a_stage_that_is_stopped_has_taken_less_than_nine_minutes() -> None:
    assert number("SECONDS_A_STAGE") + number("KILL_AFTER") < NINE_MINUTES


def test_each_part_of_the_full_benchmarks_has_time_for_its_rows() -> None:
    parts = re.findall(r"full-\d\) benchmark --only ([\w ]+?) ;;", SCRIPT.read_text(encoding="utf-8"))
    names = [part.split() for part in parts]
    assert sorted(sum(names, [])) == sorted(ORDER)
    seconds = number("SECONDS_A_STAGE") - BEFORE_ITS_LIMIT
    for part in names:
        assert needed(part, Options()) <= 0.8 * seconds, part
    assert needed(ORDER, Options(quick=True)) <= seconds


def needed(names: Sequence[str], options: Options) -> float:
    return sum(job.row.needs_seconds for job in jobs_of(names, options))


def test_the_sanitizer_watches_every_file_of_kernel_cases() -> None:
    (pattern,) = re.findall(r"(tests/optim/fused/kernel_cases_\S+)", SCRIPT.read_text(encoding="utf-8"))
    assert {path.name for path in ROOT.glob(pattern)} == {"kernel_cases_noise.py", "kernel_cases_steps.py"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("memory",), "stage 'memory' is unknown; the stages are: imports facts"),
        (("--seconds", "soon"), "--seconds soon is no count of seconds"),
        (("--results",), "--results needs a value"),
        (("--wheels", "/nowhere"), "--wheels /nowhere is no folder"),
    ],
)
def test_bad_arguments_are_refused(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    results = () if arguments[0] == "--results" else ("--results", str(tmp_path))
    done = first_card(*results, *arguments)
    assert done.returncode == 2
    assert said in done.stderr


def test_a_failing_stage_is_noted_and_keeps_no_other_from_running(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text(
        f'#!/bin/sh\ncase "$*" in *import_everything*) exit 3 ;; esac\nexec {sys.executable} "$@"\n'
    )
    broken.chmod(0o755)
    results = tmp_path / "results"
    done = subprocess.run(
        ["bash", str(SCRIPT), "--results", str(results), "imports", "sanitizer"],
        env={**os.environ, "PYTHON": str(broken), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    notes = [json.loads(line) for line in (results / "stages.jsonl").read_text().splitlines()]
    assert [(note["stage"], note["status"]) for note in notes] == [
        ("imports", "failed with exit code 3"),
        ("sanitizer", "skipped"),
    ]
    assert {note["card"] for note in notes} == {"none"}


def test_modules_import_without_what_a_bare_machine_lacks() -> None:
    lacking = (
        "jsonargparse",
        "docstring_parser",
        "typeshed_client",
        "bitsandbytes",
        "torchao",
        "datasets",
        "pyarrow",
        "flash_attn",
    )
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "import_everything.py"), *lacking],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 failed" in done.stdout
    without = [line for line in done.stdout.splitlines() if "halted" in line]
    assert all(
        line.startswith("lightning_memkit.plugins.") for line in without
    )  # the command line's, and no core
