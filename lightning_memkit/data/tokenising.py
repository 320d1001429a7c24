"""A source to tokens once: in several processes where it takes longer than a second, and with a progress bar."""

import gc
import multiprocessing
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain

from lightning_memkit.data.cache import cache_key, cached
from lightning_memkit.data.records import Encoder
from lightning_memkit.data.sources import Part
from lightning_memkit.data.store import TokenStore, joined
from lightning_memkit.utilities.forks import leave_inherited, starting
from lightning_memkit.utilities.progress import ProgressBar

_ALONE_SECONDS = 1.0  # starting processes takes a good part of a second
_PARTS_AHEAD = 4  # a process
_LOOKS_UP_SECONDS = 1.0

_encoder: Encoder | None = None  # of a worker process


def tokenised(encoder: Encoder, *, processes: int | None = None, verify: bool = True) -> TokenStore:
    """All documents of a source as tokens, mapped from the cache; tokenised where it isn't there.

    What has no identity is read anew every time, and kept in memory.

    Args:
        encoder: The source, and how its records are read.
        processes: At the most; None: one for every core that this process may use.
        verify: compares a cached file with its checksums.
    """
    identity = encoder.identity

    def stores() -> Iterator[TokenStore]:
        with ProgressBar(f"tokenising {encoder.source.name}", encoder.source.work) as bar:
            for store, work in encoded(encoder, processes if processes is not None else available_cores()):
                yield store
                bar.advance(work)

    if identity["source"] is None:
        return joined(stores())
    name = "".join(letter if letter.isalnum() else "-" for letter in encoder.source.name)[:40].strip("-")
    return cached(f"{name}-{cache_key(**identity)}", stores, verify=verify)


def encoded(encoder: Encoder, processes: int) -> Iterator[tuple[TokenStore, int]]:
    """The parts of a source in order, each with its share of the source's work."""
    parts, begin = encoder.source.parts(), time.perf_counter()
    for part in parts:
        if processes > 1 and time.perf_counter() - begin > _ALONE_SECONDS:
            yield from _by_processes(encoder, chain([part], parts), processes)
            return
        yield encoder(part), part.work


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _by_processes(
    encoder: Encoder, parts: Iterator[Part], processes: int
) -> Iterator[tuple[TokenStore, int]]:
    # A forked process need not import the user's script again, which may have no guard against that.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    waiting: deque[tuple[Future[TokenStore], int]] = deque()
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process a core is enough
    begin = (encoder, gc.isenabled(), os.getpid())
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_start, initargs=begin)
    try:
        for part in parts:
            with starting():  # the first starts them all
                waiting.append((pool.submit(_encode, part), part.work))
            if len(waiting) >= _PARTS_AHEAD * processes:
                yield _first(waiting)
        while waiting:
            yield _first(waiting)
    except BrokenProcessPool as error:
        raise RuntimeError(
            f"A process that tokenised {encoder.source.name} died, most often for want of memory; try fewer with "
            "documents.processes, in Python with DocumentOptions(processes=1)."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def _first(waiting: "deque[tuple[Future[TokenStore], int]]") -> tuple[TokenStore, int]:
    future, work = waiting.popleft()
    return future.result(), work


def _start(encoder: Encoder, collects: bool, parent: int) -> None:
    global _encoder
    leave_inherited(collects=collects)
    _encoder = encoder
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """End this process once the one that started it is gone: it would wait for work for ever where that was killed."""
    while os.getppid() == parent:
        time.sleep(_LOOKS_UP_SECONDS)
    os._exit(1)


def _encode(part: Part) -> TokenStore:
    assert _encoder is not None
    return _encoder(part)
