"""Run work in a fork of this process, to which its changes and crashes are confined."""

import contextlib
import os
import pickle
import random
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any, BinaryIO, NoReturn, TypeVar

import torch

from lightning_memkit.utilities.errors import PredictionError
from lightning_memkit.utilities.forks import hide_accelerators, leave_inherited, starting

T = TypeVar("T")

# Part of autograd's error in a fork of a process in which it has used an accelerator.
NO_AUTOGRAD_IN_FORKS = "autograd's threading in combination with fork"
_LOOKS_UP_SECONDS = 1.0
_WORDS = 2000  # the most characters of the fork's output in an error


def contained(work: Callable[[], T], *, timeout_s: float = 600) -> T:
    """Return `work`'s result from a fork of this process; objects, random state and files stay unchanged.

    Nothing is pickled on the way in, and memory pages are shared until they are written. The fork uses one
    thread, sees no accelerator, and starts in a temporary folder of its own; its output is discarded, or
    becomes part of the error. Windows has no forks.

    Args:
        work: returns something that can be pickled.
        timeout_s: seconds after which the fork is killed.

    Raises:
        PredictionError: the fork ended without a result, by a signal or by an error of its own.
    """
    with tempfile.TemporaryDirectory(prefix="memkit-") as folder, tempfile.TemporaryFile() as printed:
        receiving, sending = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        with starting() as collects:
            with warnings.catch_warnings():
                # Python warns of forking with threads; the fork uses no locks that other threads may hold.
                warnings.simplefilter("ignore", DeprecationWarning)
                parent, numbers, child = os.getpid(), random.getstate(), os.fork()
            if child == 0:
                random.setstate(numbers)  # Python seeds it anew in a fork
                leave_inherited(collects=collects)
                _run(work, (receiving, sending), printed, (parent, folder))
        os.close(sending)
        try:
            answer = _answer(child, receiving, timeout_s)
        finally:
            _, status = os.waitpid(child, 0)
        if answer is None:
            raise PredictionError(f"The prediction did not end within {timeout_s:.0f} s; raise timeout_s.")
        if not answer:
            raise PredictionError(_died(status, printed))
    outcome: Any = pickle.loads(answer)
    if isinstance(outcome, _Failure):
        outcome.reraise()
    return outcome


class _RemoteTraceback(Exception):
    """The traceback from the fork, as the cause of the same error here."""


class _Failure:
    """An exception to send to another process: itself if it can be pickled, else its text."""

    def __init__(self, error: BaseException) -> None:
        self._trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        self._error: Exception = PredictionError(f"{type(error).__name__}: {error}")
        if isinstance(error, Exception):
            with contextlib.suppress(Exception):
                self._error = pickle.loads(pickle.dumps(error))

    def reraise(self) -> NoReturn:
        raise self._error from _RemoteTraceback(f"\n{self._trace}")


def _run(
    work: Callable[[], Any], pipe_ends: tuple[int, int], printed: BinaryIO, of: tuple[int, str]
) -> NoReturn:
    """The whole life of the fork; never returns, since the callers' frames belong to the original process."""
    status, (receiving, sending), (parent, folder) = 1, pipe_ends, of
    try:
        os.close(receiving)
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
        sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, closefd=False)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the original process stops it
        os.chdir(folder)
        hide_accelerators()
        torch.set_num_threads(1)  # the original's thread pools don't exist in a fork
        try:
            outcome: Any = work()
            message = pickle.dumps(outcome)
        except BaseException as error:
            message = pickle.dumps(_Failure(error))
        with open(sending, "wb") as pipe:
            pipe.write(message)
        status = 0
    finally:
        os._exit(status)  # skip destructors and exit handlers, which belong to the original


def _end_with(parent: int) -> None:
    """End the fork when the original process has been killed, since nobody waits for its result."""
    while os.getppid() == parent:
        time.sleep(_LOOKS_UP_SECONDS)
    os._exit(1)


def _answer(child: int, receiving: int, timeout_s: float) -> bytes | None:
    """What the fork sent before it ended; None if it had to be killed."""
    parts: list[bytes] = []
    ends = time.monotonic() + timeout_s
    try:
        while True:
            ready, _, _ = select.select([receiving], [], [], max(0.0, ends - time.monotonic()))
            if not ready:
                os.kill(child, signal.SIGKILL)
                return None
            part = os.read(receiving, 1 << 20)
            if not part:
                return b"".join(parts)
            parts.append(part)
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        os.close(receiving)


def _died(status: int, printed: BinaryIO) -> str:
    printed.seek(0)
    words = printed.read().decode(errors="replace")[-_WORDS:].strip()
    if os.WIFSIGNALED(status):
        cause = f"was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    else:
        cause = f"exited with status {os.waitstatus_to_exitcode(status)}"
    return (
        f"The process that predicts {cause}; this one is unharmed. It last printed:\n{words or '(nothing)'}"
    )
