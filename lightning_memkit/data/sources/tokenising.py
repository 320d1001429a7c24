"""Tokenizes a source once: in several processes if it takes longer than a second, and with a progress bar."""

import os
import time
import warnings
from collections.abc import Iterator
from functools import partial
from itertools import chain

from lightning_memkit.data.loading.worker_batches import BatchError, WorkerBatches, WorkerOptions
from lightning_memkit.data.sources.cache import cache_key, cached
from lightning_memkit.data.sources.records import Encoder
from lightning_memkit.data.sources.source import SourcePart
from lightning_memkit.data.sources.store import TokenStore, joined
from lightning_memkit.memory.processors import usable_processors
from lightning_memkit.utilities.progress import ProgressBar

_ALONE_SECONDS = 1.0  # starting processes takes a good part of a second
_PARTS_AHEAD = 4  # for each process


def tokenised(encoder: Encoder, *, processes: int | None = None, verify: bool = True) -> TokenStore:
    """All documents of a source as tokens, mapped from the cache; tokenized if the cache does not have them.

    A source without an identity is read every time, and its tokens are kept in memory.

    Args:
        encoder: The source, and how its records are read.
        processes: The most processes; None: one for every core that this process may use.
        verify: compare a cached file with its checksums.
    """
    identity = encoder.identity

    def stores() -> Iterator[TokenStore]:
        with ProgressBar(f"tokenising {encoder.source.name}", encoder.source.work) as bar:
            for store, work in encoded(encoder, processes or max(1, int(usable_processors()))):
                yield store
                bar.advance(work)

    if identity["source"] is None:
        return joined(stores())
    name = "".join(letter if letter.isalnum() else "-" for letter in encoder.source.name)[:40].strip("-")
    return cached(f"{name}-{cache_key(**identity)}", stores, verify=verify)


def encoded(encoder: Encoder, processes: int) -> Iterator[tuple[TokenStore, int]]:
    """Yield the parts of a source in order, each with its contribution to the source's work."""
    parts, begin = encoder.source.parts(), time.perf_counter()
    for part in parts:
        if processes > 1 and time.perf_counter() - begin > _ALONE_SECONDS:
            yield from _by_processes(encoder, chain([part], parts), processes)
            return
        yield encoder(part), part.work


def _by_processes(
    encoder: Encoder, parts: Iterator[SourcePart], processes: int
) -> Iterator[tuple[TokenStore, int]]:
    # Forked processes need not import the user's script again, which may have no guard against that.
    options = WorkerOptions(num_workers=processes, prefetch=_PARTS_AHEAD, on_start=_without_threads)
    workers = WorkerBatches(partial(_encode, encoder), options)
    try:
        for built in workers.batches(_or_error(parts)):
            result, said = built.batch
            # A process's warnings reach neither this one's filters nor its log.
            for message, category in said:
                warnings.warn(message, category, stacklevel=2)
            if isinstance(result, Exception):
                raise result
            yield result
    except BatchError as error:
        raise RuntimeError(
            f"A process that tokenised {encoder.source.name} died, most often for want of memory; try fewer with "
            f"documents.processes, in Python with DocumentOptions(processes=1). {error}"
        ) from error


def _or_error(parts: Iterator[SourcePart]) -> Iterator[tuple[int, SourcePart | Exception]]:
    """Yield the parts, or the error of reading them: errors are sent as values, so that they arrive unchanged."""
    try:
        yield from enumerate(parts)
    except Exception as error:
        yield 0, error


def _encode(
    encoder: Encoder, job: tuple[int, SourcePart | Exception]
) -> tuple[tuple[TokenStore, int] | Exception, list[tuple[str, type[Warning]]]]:
    """A part's tokens, or the error, and the warnings that were given on the way."""
    _, part = job
    if isinstance(part, Exception):
        return part, []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            result = encoder(part), part.work
        except Exception as error:
            result = error
    return result, [(str(one.message), one.category) for one in said]


def _without_threads(worker: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process per core is enough
