"""A single thread that writes checkpoints in order while training goes on."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

_log = logging.getLogger(__name__)


class BackgroundWriter:
    """Runs jobs in order in one thread; the process waits for them before it exits.

    After a job has failed, no other runs until `wait` has raised its error: removing an old checkpoint after
    the new one could not be written would leave none.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._jobs: list[Future[None]] = []
        self._error: BaseException | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy gets its own thread, and none of these jobs."""
        return {"_executor": None, "_jobs": [], "_error": None}

    def submit(self, job: Callable[[], object]) -> Future[None]:
        """Run a job after earlier ones; the future completes when the job has ended, even if it failed."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="memkit-checkpoints")
        ended = self._executor.submit(self._run, job)
        self._jobs.append(ended)
        return ended

    def wait(self) -> None:
        """Return when all jobs are done.

        Raises:
            BaseException: the error of the first job that failed, once.
        """
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.result()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for all jobs and end the thread; the next job starts another."""
        try:
            self.wait()
        finally:
            if self._executor is not None:
                self._executor.shutdown()
                self._executor = None

    def _run(self, job: Callable[[], object]) -> None:
        if self._error is not None:
            return
        try:
            job()
        except BaseException as error:
            self._error = error
            _log.error("A checkpoint could not be written: %s", error)  # `wait` may never be called again


def host_copies(state: Any) -> Any:
    """A nested state with its tensors (or local shards) copied to host memory, for a thread to write.

    A tensor that occurs twice stays one tensor.
    """
    done: dict[Any, Tensor] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return deepcopy(value)
        local = value.to_local() if isinstance(value, DTensor) else value
        # The same view of the same memory; addresses are unique, since the originals stay alive meanwhile.
        place = (local.device, local.data_ptr(), local.dtype, local.shape, local.stride())
        key = (*place, local.is_conj(), local.is_neg(), type(value))
        if local.numel() == 0 or key not in done:
            done[key] = value.detach().to("cpu", copy=True)
        return done[key]

    return tree_map(copied, state)
