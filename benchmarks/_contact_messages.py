"""Runs a mistake in a process and a folder of its own, and says what its message lacks."""

import copy
import os
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import yaml

from benchmarks._contact_mistakes import CHECKPOINT, CORPUS, JOB, LINES, Mistake
from benchmarks._contact_models import STEPPED

WIDTH, MOST_LINES = 120, 3
OUTPUT = "printed.txt"
BEGINS = ("memkit: ", "usage: ", "error: ")
PROCESSES = get_context("forkserver")
PRELOADED = ["benchmarks._contact_models", "lightning_memkit.plugins.cli.memkit_cli"]


@dataclass(frozen=True)
class Told:
    """What became of a mistake.

    Attributes:
        code: the exit code.
        message: the lines from the first that reports an error.
        lines: how many these are on a terminal of `WIDTH` columns.
        left: files that were not there before.
        stepped: whether a training step had ended.
    """

    code: int
    message: str
    lines: int
    left: list[str]
    stepped: bool

    def lacks(self, mistake: Mistake) -> list[str]:
        """What is wrong with the message, in words; nothing if it is as it should be."""
        found = [f"does not name {name!r}" for name in mistake.names if name not in self.message]
        if self.code == 0:
            found.append("is no error")
        if self.lines > MOST_LINES:
            found.append(f"takes {self.lines} lines")
        if self.stepped and not mistake.late:
            found.append("comes after a step")
        if self.left:
            found.append(f"leaves {', '.join(self.left)}")
        return found


def told(mistakes: list[Mistake]) -> list[Told]:
    """Make these mistakes one after the other."""
    with PROCESSES.Pool(1, maxtasksperchild=1) as pool:
        return [pool.apply(_made, (mistake,)) for mistake in mistakes]


def _made(mistake: Mistake) -> Told:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            return _made_here(mistake)
        finally:
            os.chdir("/")


def _made_here(mistake: Mistake) -> Told:
    Path(CORPUS).write_bytes(LINES)
    if mistake.earlier is not None:
        _earlier(changed(JOB, mistake.earlier))
    for name, stored in mistake.files.items():
        Path(name).write_bytes(stored)
    words = list(mistake.words)
    if mistake.changes is not None:
        Path("job.yaml").write_text(yaml.safe_dump(changed(JOB, mistake.changes)))
        words += ["--config", "job.yaml"]
    if mistake.spoil is not None:
        mistake.spoil()
    before = _files()
    with _printed_into(OUTPUT):
        code = _run(mistake.code) if mistake.code else _command(words)
    # Lightning saves the config of each run, whole.
    left = sorted(_files() - before - {STEPPED, OUTPUT, "config.yaml"})
    message = _error_of(Path(OUTPUT).read_text()) if code else ""
    lines = sum(max(1, len(textwrap.wrap(line, WIDTH))) for line in message.splitlines())
    return Told(code, message, lines, left, Path(STEPPED).exists())


def _earlier(config: dict[str, Any]) -> None:
    """A run that leaves a checkpoint."""
    saved = changed(
        config,
        {
            "trainer.enable_checkpointing": True,
            "trainer.callbacks": [
                *config["trainer"]["callbacks"],
                {
                    "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
                    "init_args": {"dirpath": ".", "filename": CHECKPOINT.partition(".")[0], "every_n_train_steps": 2},
                },
            ],
        },
    )  # fmt: skip
    Path("earlier.yaml").write_text(yaml.safe_dump(saved))
    with _printed_into(OUTPUT):
        code = _command(["fit", "--config", "earlier.yaml"])
    if code or not Path(CHECKPOINT).exists():
        raise RuntimeError(f"The run before a mistake ended with {code}:\n{Path(OUTPUT).read_text()[-2000:]}")
    Path(STEPPED).unlink()


@contextmanager
def _printed_into(path: str) -> Iterator[None]:
    """Write what this process prints into a file, also through handlers that hold its streams."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    kept = [(stream, os.dup(stream.fileno())) for stream in (sys.stdout, sys.stderr)]
    try:
        for stream, _ in kept:
            stream.flush()
            os.dup2(file, stream.fileno())
        yield
    finally:
        for stream, descriptor in kept:
            stream.flush()
            os.dup2(descriptor, stream.fileno())
            os.close(descriptor)
        os.close(file)


def _command(words: list[str]) -> int:
    from lightning_memkit.cli import main

    try:
        return main(words)
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else 1


def _run(code: str) -> int:
    try:
        exec(code, {})
    except Exception as error:
        print(*traceback.format_exception_only(error), sep="", file=sys.stderr)
        return 1
    return 0


def _error_of(text: str) -> str:
    lines = text.strip().splitlines()
    first = next((at for at, line in enumerate(lines) if line.startswith(BEGINS) or "Error: " in line), 0)
    return "\n".join(lines[first:])


def _files() -> set[str]:
    return {str(path) for path in Path(".").rglob("*") if path.is_file()}


def changed(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with other values at dotted keys."""
    copied = copy.deepcopy(dict(config))
    for key, value in changes.items():
        *parents, last = key.split(".")
        place = copied
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return copied
