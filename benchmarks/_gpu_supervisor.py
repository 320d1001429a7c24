"""Rows run in a process apart, which is killed when it hangs and started again when it is gone."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks._gpu_rows import GpuRow, Values
from benchmarks.harness import Options
from benchmarks.record import ROOT

START_SECONDS = 120.0
_LOG_CHARACTERS = 1500  # of what a process printed, where it ended without an answer


@dataclass(frozen=True, kw_only=True)
class Job:
    """A row and the benchmark that it is of."""

    benchmark: str
    row: GpuRow


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a row.

    Args:
        job: the row.
        kind: "ok", "limit missed", "failed", "skipped" (it can't run here) or "no time".
        why: the reason, where it is not "ok".
        seconds: what it took.
        values: what it measured.
    """

    job: Job
    kind: str
    why: str = ""
    seconds: float = 0.0
    values: Values = field(default_factory=dict)

    @property
    def passes(self) -> bool:
        """Whether the exit code may be 0."""
        return self.kind in ("ok", "skipped")


class Ended(Exception):
    """The process is gone, or had to be killed."""


class Worker:
    """One process that runs rows; `hardware` is what it found."""

    def __init__(self, package: str, options: Options, seconds: float) -> None:
        self._pipe, writing = os.pipe()
        self._buffer = b""
        self._log = tempfile.TemporaryFile("w+", errors="replace")
        command = [sys.executable, "-m", "benchmarks._gpu_worker", str(writing), package]
        self._process = subprocess.Popen(
            [*command, json.dumps(asdict(options))],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            pass_fds=(writing,),
            start_new_session=True,
        )
        os.close(writing)
        try:
            self.hardware: dict[str, Any] = self._answer(seconds)["hardware"]
        except BaseException:
            self.stop()
            raise

    def ask(self, job: Job, seconds: float) -> dict[str, Any]:
        """Run a row.

        Raises:
            Ended: the process ended without an answer, or gave none in time; it is no more.
        """
        assert self._process.stdin is not None
        line = json.dumps({"benchmark": job.benchmark, "what": job.row.what})
        with contextlib.suppress(BrokenPipeError):  # it ended after its last answer; `_answer` says so
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        try:
            return self._answer(seconds)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End it, and with it what it has started."""
        # The whole group: a loader's workers would otherwise keep the device.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        if not self._log.closed:
            os.close(self._pipe)
            self._log.close()

    def _answer(self, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0:
                raise Ended(f"stopped after {seconds:.0f} s")
            # In slices: a process that is gone may have left the pipe's other end to one that it started.
            if select.select([self._pipe], [], [], min(left, 0.5))[0]:
                read = os.read(self._pipe, 1 << 16)
                if not read:
                    raise Ended(self._died())
                self._buffer += read
            elif self._process.poll() is not None:
                raise Ended(self._died())
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def _died(self) -> str:
        code = self._process.wait()
        self._log.seek(0)
        said = " ".join(self._log.read()[-_LOG_CHARACTERS:].split())
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return f"the process ended {how}" + (f": {said}" if said else "")


class Supervisor:
    """A worker at a time, and another one after each that is gone."""

    def __init__(self, package: str, options: Options) -> None:
        self._package, self._options = package, options
        self._worker: Worker | None = None
        self.hardware: dict[str, Any] | None = None

    def start(self, seconds: float) -> str:
        """Have a process that waits for rows; returns why there is none."""
        if self._worker is not None:
            return ""
        try:
            self._worker = Worker(self._package, self._options, min(seconds, START_SECONDS))
        except Ended as reason:
            return f"no process for rows: {reason}"
        self.hardware = self._worker.hardware
        return ""

    def run(self, job: Job, seconds: float) -> Outcome:
        """Run a row for at most so many seconds; `start` comes first."""
        assert self._worker is not None
        start = time.monotonic()
        try:
            answer = self._worker.ask(job, seconds)
        except Ended as reason:
            self._worker = None
            return Outcome(job=job, kind="failed", why=str(reason), seconds=time.monotonic() - start)
        if answer["last"]:
            self.stop()
        return _outcome(job, answer)

    def stop(self) -> None:
        """End the process that waits for rows."""
        if self._worker is not None:
            self._worker.stop()
        self._worker = None


def _outcome(job: Job, answer: dict[str, Any]) -> Outcome:
    for kind in ("skipped", "failed"):
        if kind in answer:
            return Outcome(job=job, kind=kind, why=answer[kind], seconds=answer["seconds"])
    missed = job.row.missed(answer["values"])
    kind = "limit missed" if missed else "ok"
    return Outcome(
        job=job, kind=kind, why="; ".join(missed), seconds=answer["seconds"], values=answer["values"]
    )
