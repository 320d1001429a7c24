"""Have ranks run evaluation batches together: under sharding, and under DDP if the step communicates."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.nn.parallel import DistributedDataParallel

from lightning_memkit.distributed.catch_up import why_no_catch_up
from lightning_memkit.distributed.ddp import broadcast_buffers, local_gradients
from lightning_memkit.distributed.fsdp2 import sharded_states
from lightning_memkit.micro_batching.ranks.agreement import Unretried
from lightning_memkit.micro_batching.ranks.alone import Ranks
from lightning_memkit.micro_batching.ranks.together import Announced, Sharded
from lightning_memkit.micro_batching.run import Run


class EvaluationRanks:
    """Creates the means of agreement once ranks need them; all ranks call it at the same batches.

    Args:
        run: the loop, whose model is set up.
        recover: whether batches are to be retried; otherwise FSDP2's collectives are not replaced.
    """

    def __init__(self, run: Run, *, recover: bool) -> None:
        self._run = run
        self._recover = recover
        self._made: Ranks | None = None

    def of(self, communicates: Callable[[], bool]) -> Ranks:
        """What ranks do together in a loader's batches.

        Args:
            communicates: whether the user's step issues collectives; called on all ranks, under DDP only.
        """
        if self._run.world_size == 1:
            return Ranks()
        sharded = self._run.meets_in_every_micro_batch
        if not sharded and not communicates():
            return Ranks()
        if self._made is None:
            self._made = self._sharded() if sharded else self._announced()
        return self._made

    def _announced(self) -> Ranks:
        return Announced() if self._recover else Unretried(self._run, "recover=False", meets=True)

    def _sharded(self) -> Ranks:
        model = self._run.wrapped
        if not self._recover or model is None:
            return Unretried(self._run, "recover=False")
        reason = why_no_catch_up(model) if sharded_states(model) else "it is not sharded by FSDP2"
        return Unretried(self._run, reason) if reason else Sharded(model)

    @contextmanager
    def batch(self, *, counts: bool) -> Iterator[None]:
        """Enclose a batch's forwards; DDP broadcasts rank 0's buffers only before a batch that counts."""
        model = self._run.wrapped
        if not isinstance(model, DistributedDataParallel):
            yield
            return
        if counts:
            broadcast_buffers(model)
        with local_gradients(model):
            yield

    def close(self) -> None:
        """Release the process groups and restore FSDP2's own collectives."""
        if self._made is not None:
            self._made.close()
        self._made = None
