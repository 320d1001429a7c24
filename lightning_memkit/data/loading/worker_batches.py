"""Batches built ahead by worker processes: each is timed, and a failure names its batch and the reason.

The processes are those of torch's DataLoader. In addition, the workers report how long a batch took and, in
memory that they share with this process, which batch they have begun, since a worker that is killed can't
report anything.
"""

import contextlib
import gc
import multiprocessing.connection
import re
import signal
import time
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data._utils import signal_handling

from lightning_memkit.data.loading.ahead import ahead
from lightning_memkit.memory.processors import wanted_processor_seconds
from lightning_memkit.utilities.forks import leave_inherited, starting

_DYING_SECONDS = 5.0
_RAISED_IN_WORKER = "in DataLoader worker process"  # how torch words an error that a worker has sent
_IN_WORKER = re.compile(rf"{_RAISED_IN_WORKER} (\d+)")
Job = tuple[int, Any]  # a batch's number in its epoch, and what it is built from
_MANY_WORKERS = "This DataLoader will create"  # torch counts cores, the tuner measures the workers' time


class Built(NamedTuple):
    """A batch, and the seconds to build it: elapsed, and those for which it wanted a processor."""

    batch: Any
    seconds: float
    cpu_seconds: float


class BatchError(RuntimeError):
    """A batch was not built: names the batch, with the worker's own traceback or with what ended the worker."""


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """How worker processes build.

    Attributes:
        num_workers: Processes; 0 builds in this one.
        prefetch: Batches that each worker builds ahead.
        pin_memory: Puts batches into page-locked memory; needs an accelerator.
        timeout: Seconds to wait for a batch; 0 waits forever.
        context: How processes start: torch's ``multiprocessing_context``.
        on_start: Called first in every worker, with its number.
        is_persistent: Workers stay for the next epoch.
        seed: The seed of what torch seeds in a worker when it starts.
        receives_ahead: A thread takes the next batch out of shared memory while the last one is used (one
            more batch is held). It also draws the jobs, so drawing them must not change anything that
            training sees.
    """

    num_workers: int = 0
    prefetch: int = 2
    pin_memory: bool = False
    timeout: float = 0
    context: Any = None
    on_start: Callable[[int], Any] | None = None
    is_persistent: bool = False
    seed: int = 0
    receives_ahead: bool = False


class WorkerBatches:
    """Builds jobs in worker processes, in their order; `batches` may be called repeatedly.

    Args:
        build: Makes a batch of a job; picklable if processes are spawned.
        options: How workers build.
    """

    def __init__(self, build: Callable[[Job], Any], options: WorkerOptions) -> None:
        self._options = options
        self._jobs = _Jobs()
        # For each worker the number of the batch that it has begun and of the last that it built; shared
        # before any process starts.
        self._begun = torch.full((max(1, options.num_workers), 2), -1, dtype=torch.int64).share_memory_()
        with _any_number_of_workers():
            self._loader: DataLoader[Any] = DataLoader(
                _Builds(build, self._begun),
                batch_size=None,
                sampler=self._jobs,
                num_workers=options.num_workers,
                prefetch_factor=options.prefetch if options.num_workers else None,
                collate_fn=_unchanged,
                pin_memory=options.pin_memory,
                timeout=options.timeout if options.num_workers else 0,
                multiprocessing_context=options.context if options.num_workers else None,
                worker_init_fn=partial(_begin, on_start=options.on_start, collects=gc.isenabled()),
                persistent_workers=options.is_persistent and options.num_workers > 0,
                # Otherwise it draws from the global generator.
                generator=torch.Generator().manual_seed(options.seed),
            )
        self._iterator: Any = None

    def batches(self, jobs: Iterable[Job]) -> Generator[Built, None, None]:
        """Yield the jobs' batches; workers that are not persistent end with the generator.

        Raises:
            BatchError: a worker raised an error or died. Without workers an error is raised as it is.
        """
        self._begun.fill_(-1)
        asked = _Numbered(jobs)
        self._jobs.jobs = asked
        if not self._options.num_workers:
            yield from self._loader
            return
        try:
            with _any_number_of_workers(), starting():
                self._iterator = iter(self._loader)
            _raise_only_here(self._iterator)
            _keep_queues(self._iterator)
            with contextlib.closing(self._received()) as received:
                yield from map(asked.taken, received)
        except Exception as error:
            explained = self._explained(error, asked)
            self._end_workers()
            raise explained from error
        finally:
            if not self._options.is_persistent:
                self._end_workers()

    def _received(self) -> Generator[Built, None, None]:
        if self._options.receives_ahead:
            yield from ahead(self._iterator, 1, name="memkit loader")
        else:
            yield from self._iterator

    def _end_workers(self) -> None:
        end = getattr(self._iterator, "_shutdown_workers", None)
        self._iterator = self._loader._iterator = None
        if end is not None:
            with contextlib.suppress(RuntimeError):  # it may report a dead worker, which is known by now
                end()

    def _explained(self, error: Exception, asked: "_Numbered") -> BatchError:
        processes = list(getattr(self._iterator, "_workers", ()))
        if isinstance(error, (OSError, EOFError)) and _RAISED_IN_WORKER not in str(error):
            # A dying worker takes batches with it that it has sent.
            ended = multiprocessing.connection.wait([one.sentinel for one in processes], _DYING_SECONDS)
            for process in processes:
                process.join(_DYING_SECONDS if process.sentinel in ended else 0)
        if _RAISED_IN_WORKER not in str(error):
            # A worker ends by itself only if something has ended it, even with exit code 0 (`sys.exit()`, or
            # a KeyboardInterrupt in a data set). Workers that failed come first.
            ended = [index for index, process in enumerate(processes) if process.exitcode is not None]
            for index in sorted(ended, key=lambda index: processes[index].exitcode == 0):
                process = processes[index]
                return BatchError(
                    f"Worker {index} (process {process.pid}) {_ending(process.exitcode)} {self._where(index)}."
                )
        raised = _IN_WORKER.search(str(error))
        if raised is not None and int(self._begun[int(raised[1]), 0]) < 0:
            return BatchError(
                f"Worker {raised[1]} could not start: its worker_init_fn raised before the first batch. {error}"
            )
        return BatchError(f"Batch {asked.number_of_next()} of the epoch was not built. {error}")

    def _where(self, worker: int) -> str:
        begun, built = self._begun[worker].tolist()
        if begun < 0:
            return "before its first batch"
        return (
            f"after batch {built} of the epoch"
            if begun == built
            else f"while it built batch {begun} of the epoch"
        )


def _raise_only_here(iterator: Any) -> None:
    """Remove the workers from torch's watch, whose error would interrupt the training step at any point.

    A worker that dies is noticed when its batch is waited for, within torch's 5 s.
    """
    forget = getattr(signal_handling, "_remove_worker_pids", None)
    if forget is not None and getattr(iterator, "_worker_pids_set", False):
        forget(id(iterator))
        iterator._worker_pids_set = False


def _keep_queues(iterator: Any) -> None:
    """Keep the queues by which torch tells its workers to end until the iterator is finalized.

    What holds an iterator is often in a reference cycle, as a Trainer is. The collector would close the queues before
    it ends the workers, and wait 5 s for each.
    """
    # A finalizer holds its arguments until it is called, which is before the iterator's own; this one does nothing.
    weakref.finalize(iterator, _unchanged, getattr(iterator, "_index_queues", None)).atexit = False


@contextlib.contextmanager
def _any_number_of_workers() -> Iterator[None]:
    """Suppress torch's warning, which counts cores; who chose the number may know what a worker needs."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_MANY_WORKERS)
        yield


class _Jobs:
    """The sampler of torch's loader: yields the jobs that are set now."""

    def __init__(self) -> None:
        self.jobs: Iterable[Job] = ()

    def __iter__(self) -> Iterator[Job]:
        return iter(self.jobs)


class _Numbered:
    """Jobs that are drawn ahead, and the number of the job whose batch comes next."""

    def __init__(self, jobs: Iterable[Job]) -> None:
        self._jobs = jobs
        self._waiting: list[int] = []

    def __iter__(self) -> Iterator[Job]:
        for job in self._jobs:
            self._waiting.append(job[0])
            yield job

    def taken(self, built: Any) -> Any:
        """Record that the batch of the oldest job has come, and return it."""
        self.number_of_next()
        return built

    def number_of_next(self) -> int:
        """Remove and return the number of the oldest job whose batch has not come; 0 if there is none."""
        return self._waiting.pop(0) if self._waiting else 0


class _Builds(Dataset[Built]):
    """A data set that builds a job when torch requests an item."""

    def __init__(self, build: Callable[[Job], Any], begun: Tensor) -> None:
        self._build, self._begun = build, begun

    def __getitem__(self, job: Job) -> Built:
        worker = get_worker_info()
        if worker is not None:
            self._begun[worker.id, 0] = job[0]
        begin, cpu_begin = time.perf_counter(), wanted_processor_seconds()
        try:
            batch = self._build(job)
        except StopIteration as error:  # it would silently end the epoch
            raise RuntimeError("The data set, or what collates its samples, raised StopIteration.") from error
        if worker is not None:
            self._begun[worker.id, 1] = job[0]
        return Built(batch, time.perf_counter() - begin, wanted_processor_seconds() - cpu_begin)


def _begin(worker: int, *, on_start: Callable[[int], Any] | None, collects: bool) -> None:
    leave_inherited(collects=collects)
    if on_start is not None:
        on_start(worker)


def started_for(dataset: Any, on_start: Callable[[int], Any] | None) -> Callable[[int], Any]:
    """A `WorkerOptions.on_start` that sets `get_worker_info().dataset` to the user's, then calls ``on_start``."""
    return partial(_start, dataset=dataset, on_start=on_start)


def _start(worker: int, *, dataset: Any, on_start: Callable[[int], Any] | None) -> None:
    # The worker's own copy; torch made the object immutable.
    object.__setattr__(get_worker_info(), "dataset", dataset)
    if on_start is not None:
        on_start(worker)


def _ending(exitcode: int) -> str:
    if exitcode == 0:
        return "left with exit code 0, as by sys.exit() or a KeyboardInterrupt,"
    if exitcode > 0:
        return f"ended with exit code {exitcode}"
    name = next((known.name for known in signal.Signals if known == -exitcode), "unknown")
    out_of_memory = (
        " (what Linux sends where the host's memory runs out: fewer workers, or a smaller prefetch, take less)"
        if name == "SIGKILL"
        else ""
    )
    return f"was killed by signal {-exitcode}, {name}{out_of_memory},"


def _unchanged(built: Any) -> Any:
    return built
