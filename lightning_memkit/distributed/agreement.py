"""Ranks tell each other on the host how a step went: one small collective, no device synchronization."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ReduceOp

from lightning_memkit.distributed.timeouts import (
    RankTimeoutError,
    host_group,
    timeout_of,
    waiting_for_ranks,
)
from lightning_memkit.memory.meter import unmetered

_GOODBYE = timedelta(seconds=5)  # the longest that an ending rank waits for its peers to notice
_GOODBYE_SHARE = 1 / 5  # of the group's timeout, of which this rank may have used some already


class StepOutcome(IntEnum):
    """How a rank's attempt at a step went."""

    DONE = 0
    OUT_OF_MEMORY = 1
    ENDED = 2
    UNFORESEEN = 3


class PeerEndedError(RuntimeError):
    """Another rank ended with an error of its own, which its own log shows."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """What ranks learned from each other.

    Attributes:
        failed: the ranks that ran out of memory.
        counts: all ranks' numbers, summed.
        unforeseen: the ranks whose loss was not the foreseen one.
    """

    failed: tuple[int, ...]
    counts: tuple[float, ...]
    unforeseen: tuple[int, ...] = ()

    @property
    def any_failed(self) -> bool:
        """Whether the attempt must be retried."""
        return bool(self.failed or self.unforeseen)


class Agreement:
    """A gloo group of all ranks for flags and small numbers; made once, uses host tensors only.

    It is a separate group because collectives of one group pair up by their order: a rank that failed within
    a step has issued fewer on the training's groups than its peers. Creating it is a collective: all ranks
    must do so at the same point, before step 1.

    Args:
        counts: how many numbers `meet` can sum over the ranks besides their outcomes; the same on all ranks.

    Raises:
        PeerEndedError: from `meet`, if another rank has called `end`.
        RankTimeoutError: a peer has been silent for longer than the strategy's timeout.
        RuntimeError: from gloo, within seconds, if a peer's process is gone.
    """

    def __init__(self, counts: int = 0) -> None:
        self.group: Any = host_group()
        timeout = timeout_of(self.group)
        self._goodbye = _GOODBYE if timeout is None else min(_GOODBYE, timeout * _GOODBYE_SHARE)
        self.rank, self.world = self.group.rank(), self.group.size()
        # All messages have the same size, because a rank that ends doesn't know at which meeting its peers
        # are.
        self._numbers = torch.zeros(self.world + counts, dtype=torch.float64)
        self._lost = ""  # why the ranks can't agree any more

    def meet(self, outcome: StepOutcome = StepOutcome.DONE, counts: Sequence[float] = ()) -> Meeting:
        """Send this rank's outcome and receive the others'; `counts` are summed over the ranks."""
        with self._meeting("the ranks agreed on how a step went"):
            distributed.all_reduce(self._message(outcome, counts), group=self.group)
        told = self._numbers.tolist()
        outcomes, totals = told[: self.world], told[self.world :]
        ended = [str(rank) for rank, found in enumerate(outcomes) if found == StepOutcome.ENDED]
        if ended:
            raise PeerEndedError(
                f"Rank {', '.join(ended)} ended with an error that can't be retried, which its own log shows; "
                f"rank {self.rank} can't go on without it."
            )

        def ranks(wanted: StepOutcome) -> tuple[int, ...]:
            return tuple(rank for rank, found in enumerate(outcomes) if found == wanted)

        return Meeting(
            failed=ranks(StepOutcome.OUT_OF_MEMORY),
            counts=tuple(totals[: len(counts)]),
            unforeseen=ranks(StepOutcome.UNFORESEEN),
        )

    def end(self) -> None:
        """Tell the peers that this rank ends; takes at most 5 s if they don't listen. Raise afterwards."""
        if self._lost:  # a peer that is silent does not listen, and the others have waited for it as well
            return
        try:
            with unmetered():
                message = self._message(StepOutcome.ENDED, ())
                work = distributed.all_reduce(message, group=self.group, async_op=True)
                if work is not None:
                    work.wait(self._goodbye)
        except RuntimeError:  # peers are elsewhere or gone; only this rank's own error matters
            return

    def largest(self, values: Sequence[float]) -> list[float]:
        """Each value's maximum over the ranks; integers are exact below 2**53."""
        return self._reduced(values, ReduceOp.MAX)

    def smallest(self, values: Sequence[float]) -> list[float]:
        """Each value's minimum over the ranks."""
        return self._reduced(values, ReduceOp.MIN)

    def total(self, values: Sequence[float]) -> list[float]:
        """Each value's sum over the ranks."""
        return self._reduced(values, ReduceOp.SUM)

    def close(self) -> None:
        """Destroy the group; no collective."""
        if self.group is not None and distributed.is_initialized():
            distributed.destroy_process_group(self.group)
        self.group = None

    @contextmanager
    def working(self, purpose: str) -> Iterator[None]:
        """A context in which ranks work together in groups of their own.

        If a peer is silent there, every later agreement fails at once, also where the error is caught as one of many
        that a trial may raise: each would wait for as long again.
        """
        try:
            with waiting_for_ranks(purpose, self.group, computes=True):
                yield
        except RankTimeoutError as error:
            self._lost = str(error)
            raise

    @contextmanager
    def _meeting(self, purpose: str) -> Iterator[None]:
        if self._lost:
            raise RankTimeoutError(self._lost)
        try:
            with unmetered(), waiting_for_ranks(purpose, self.group):
                yield
        except RankTimeoutError as error:
            self._lost = str(error)
            raise

    def _reduced(self, values: Sequence[float], operation: Any) -> list[float]:
        with self._meeting("the ranks compared sizes"):
            numbers = torch.tensor(list(values), dtype=torch.float64)
            distributed.all_reduce(numbers, op=operation, group=self.group)
            return numbers.tolist()

    def _message(self, outcome: StepOutcome, counts: Sequence[float]) -> Tensor:
        """This rank's message, in a preallocated tensor: a rank without host memory can still send it."""
        numbers = self._numbers.numpy()
        numbers[:] = 0
        numbers[self.rank] = int(outcome)
        numbers[self.world : self.world + len(counts)] = counts
        return self._numbers
