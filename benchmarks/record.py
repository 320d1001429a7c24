"""Write down a benchmark's report with all that is needed to judge and repeat it."""

import json
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Options, Report

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
CODE = ("lightning_memkit", "benchmarks", "examples", "tests", "pyproject.toml", "constraints.txt")
PACKAGES = (
    "lightning_memkit",
    "torch",
    "lightning",
    "numpy",
    "torchmetrics",
    "transformers",
    "trl",
    "bitsandbytes",
    "torch-optimi",
    "torchao",
    "triton",
    "flash-attn",
    "liger-kernel",
    "cut-cross-entropy",
)


def record(
    report: Report,
    options: Options,
    *,
    seconds: float,
    on_gpu: bool,
    folder: Path = RESULTS,
    program: str = "-m benchmarks",
) -> Path:
    """Write `<name>[-quick]-<hardware>.json`, whole or not at all, and return its path.

    Args:
        report: what was measured.
        options: how.
        seconds: what it took.
        on_gpu: it was a GPU that was measured.
        folder: where the file goes.
        program: what Python ran, with this process's arguments.
    """
    hardware = describe_hardware(on_gpu=on_gpu)
    content = {
        "name": report.name,
        "quick": options.quick,
        "void": report.void,
        "figures": checked_figures(report),
        "rows": report.rows,
        "notes": list(report.notes),
        **provenance(" ".join(["python", program, *sys.argv[1:]]), options, hardware),
        "seconds": round(seconds, 1),
    }
    return write_whole(content, folder)


def provenance(command: str, options: Options, hardware: dict[str, object]) -> dict[str, object]:
    """Return what is needed to repeat a run: command, seed, threads, date, commit, hardware and versions."""
    return {
        "command": command,
        "seed": options.seed,
        "threads": torch.get_num_threads(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "commit": git_commit(),
        "hardware": hardware,
        "versions": {"python": platform.python_version(), **installed_versions()},
    }


def write_whole(content: dict[str, Any], folder: Path) -> Path:
    """Write a result to the file named by its benchmark and hardware, whole or not at all, and return its path."""
    text = json.dumps(content, indent=2, default=_plain) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    path = (
        folder / f"{content['name']}{'-quick' if content['quick'] else ''}-{content['hardware']['slug']}.json"
    )
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, encoding="utf-8") as temporary:
        temporary.write(text)
    # A temporary file is private to its user; results are committed, so they get a plain file's mode.
    os.chmod(temporary.name, 0o644)
    os.replace(temporary.name, path)
    return path


def checked_figures(report: Report) -> dict[str, float | int | bool]:
    """Return the figures as plain numbers.

    Raises:
        ValueError: A figure's name is not flat, or its value is no finite number.
    """
    figures = {}
    for name, value in report.figures.items():
        number = _plain(value)
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            raise ValueError(f"Figure {name!r} of {report.name}: names are flat, like `speedup_vs_trl`.")
        if not isinstance(number, bool | int | float) or not math.isfinite(number):
            raise ValueError(
                f"Figure {name}={value!r} of {report.name} is no finite number; leave out what was not run."
            )
        figures[name] = number
    return figures


def describe_hardware(*, on_gpu: bool) -> dict[str, object]:
    """Return CPU, cores, GPU and the slug that names the result files."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cpu = _cpu_model()
    gpu = torch.cuda.get_device_name() if on_gpu else None
    return {"slug": _slug(gpu or f"{cpu} {cores} cores"), "cpu": cpu, "cores": cores, "gpu": gpu}


def installed_versions() -> dict[str, str]:
    """Return the versions of torch, Lightning and the peers that are installed."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def git_commit() -> str:
    """Return the commit, `-dirty` where files other than results differ; `unknown` outside git."""
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return "unknown"
    changed = _git("status", "--porcelain", "--", *CODE, ":!benchmarks/results")
    return f"{commit}-dirty" if changed else commit


def git_state(code: Sequence[str]) -> list[str] | None:
    """Return the hashes of files and folders at HEAD; None where they differ from it, or outside git."""
    if _git("status", "--porcelain", "--", *code) != "":
        return None
    found = _git("rev-parse", *(f"HEAD:{path}" for path in code))
    return None if found is None else found.split()


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def _slug(text: str) -> str:
    text = re.sub(r"\((r|tm)\)|\bcpu\b|@.*?ghz|\bprocessor\b", " ", text.lower())
    return re.sub(r"[^a-z0-9]+", "-", text).strip("-")


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
