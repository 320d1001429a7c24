"""Processes for tests, with everything imported: forks of a server, where a fresh interpreter imports for seconds.

What a test runs beside itself needs other memory, another environment or a rank of its own, and seldom another
interpreter. Tests of imports and of what a shell does start `sys.executable`.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

ROOT = Path(__file__).parents[1]
LIMIT_SECONDS = 480  # of a whole sweep on a busy machine; a hang of ranks ends after 60, by their own alarm
SECONDS_TO_END = 5  # for the ranks that are left when one has failed
_SERVER = get_context("forkserver")
_SERVER.set_forkserver_preload(["tests.preloaded"])

Ran = subprocess.CompletedProcess[str]


def run_on_ranks(
    module: str,
    *arguments: str,
    ranks: int = 2,
    env: Mapping[str, str] | None = None,
    limit: float = LIMIT_SECONDS,
) -> Ran:
    """Run a module as `torchrun --standalone -m` would, on this machine; once one rank has failed, the others end."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "TORCHELASTIC_RUN_ID": "tests",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    each = [
        {**os.environ, **(env or {}), **place, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        for rank in range(ranks)
    ]
    return _ran([module, *arguments], each, ROOT, limit)


def run_module(
    module: str, *arguments: str, env: Mapping[str, str] | None = None, limit: float = LIMIT_SECONDS
) -> Ran:
    """Run a module as `python -W ignore -m` would, from the repository's root."""
    return _ran([module, *arguments], [{**os.environ, **(env or {})}], ROOT, limit)


def run_script(
    script: Path,
    *arguments: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    limit: float = LIMIT_SECONDS,
) -> Ran:
    """Run a file as `python -W ignore` would, from its own folder where no other is given."""
    return _ran([str(script), *arguments], [{**os.environ, **(env or {})}], cwd or script.parent, limit)


def _ran(words: Sequence[str], environments: Sequence[Mapping[str, str]], cwd: Path, limit: float) -> Ran:
    with TemporaryDirectory() as folder:
        files = [
            [Path(folder) / f"{rank}.{name}" for name in ("out", "err")] for rank in range(len(environments))
        ]
        processes = [
            _SERVER.Process(target=_run, args=(words, dict(one), str(cwd), *map(str, paths)))
            for one, paths in zip(environments, files, strict=True)
        ]
        for process in processes:
            process.start()
        over = _wait(processes, limit)
        out, err = (
            "".join(path.read_text(errors="replace") for path in paths) for paths in zip(*files, strict=True)
        )
    if over:
        raise subprocess.TimeoutExpired(words, limit, out, err)
    codes = [process.exitcode or 0 for process in processes]
    return Ran(words, next((code for code in codes if code), 0), out, err)


def _wait(processes: Sequence[BaseProcess], limit: float) -> bool:
    """Whether some had to be killed at the limit; after a failure the rest have a few seconds."""
    running: dict[Any, BaseProcess] = {process.sentinel: process for process in processes}
    end = time.monotonic() + limit
    over = False
    while running:
        ended = connection.wait(list(running), max(0.0, end - time.monotonic()))
        for sentinel in ended:
            process = running.pop(sentinel)
            process.join()
            if process.exitcode:
                end = min(end, time.monotonic() + SECONDS_TO_END)
        if not ended:
            over = not any(process.exitcode for process in processes)
            for process in running.values():
                process.kill()
                process.join()
            break
    return over


def _run(words: Sequence[str], environment: Mapping[str, str], cwd: str, out: str, err: str) -> None:
    """In the fork: become the process that was asked for."""
    for path, descriptor in ((out, 1), (err, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    multiprocessing.set_start_method(None, force=True)  # "forkserver" is ours, not what a program finds
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.argv[:] = words
    name, is_file = words[0], words[0].endswith(".py")
    sys.path.insert(0, str(Path(name).parent) if is_file else cwd)
    if is_file:
        runpy.run_path(name, run_name="__main__")
    else:
        runpy.run_module(name, run_name="__main__", alter_sys=True)


def selected(request: pytest.FixtureRequest, argument: str) -> list[Any]:
    """The values of an argument in the tests that will use a fixture: what its launch has to run, each once."""
    found: dict[Any, None] = {}
    for item in request.session.items:
        given = getattr(getattr(item, "callspec", None), "params", {})
        if item.path == request.path and argument in given:
            own = given.get(request.fixturename)
            if own is None or own == request.param:
                found[given[argument]] = None
    return list(found)
