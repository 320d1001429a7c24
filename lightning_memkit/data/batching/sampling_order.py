"""The order of an epoch's batches from a sampler: the same for any number of workers, and reproduced by a resume.

A sampler draws from the global random generators, or from a generator of the loader. Workers request batches
ahead of time, so that what is drawn, and when, depends on their number. Here batches are drawn when torch's
loader, with the workers that it was made with, would draw them. Where other workers need them earlier,
generators that are no global ones show it only then. The sampler's draws from global generators after the
first batch, if any, come from a random stream of its own.
"""

import zlib
from collections import deque
from collections.abc import Iterator
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_memkit.data.batching.random_numbers import (
    GlobalNumbers,
    State,
    generators_of,
    restore_generators,
)

# These draw from the global generators only for an epoch's first batch.
_DRAW_ONCE = (
    SequentialSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
)


class Order:
    """An epoch's batches by number, and the sampler's items that each is built from.

    Args:
        sampler: Yields the items that batches are built from; has a length.
        generator: The loader's generator; None: the global ones.
        ahead: Batches that torch's loader draws before the first is requested: prefetched ones of all workers.
        seed: The seed, if torch's loader would not draw one now: persistent workers keep theirs.

    Attributes:
        seed: The seed that torch's loader would have given its workers.
    """

    def __init__(
        self,
        sampler: Any,
        generator: torch.Generator | None,
        *,
        ahead: int = 0,
        seed: int | None = None,
    ) -> None:
        self._sampler, self._ahead = sampler, ahead
        self._drawn, self._has_ended = 0, False
        self._tries = 0  # batches drawn, and the one that was requested after the last
        self._crc: int | None = 0  # checksum of the items handed over; None if their kind has none
        self._waiting: deque[tuple[int, Any]] = deque()  # drawn, but not handed over yet
        self._own: GlobalNumbers | None = None  # state of the sampler's own stream
        self._generators = generators_of(sampler, generator)
        # For each try before its time, the generators' states after it; None if it left them as they were.
        self._early: deque[list[Tensor] | None] = deque()
        self._begin = self._captured()
        self._items = iter(sampler)
        if seed is None:
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
        self.seed = seed
        self._first: State | None = None
        self._draw_up_to(ahead)

    @classmethod
    def resumed(
        cls, sampler: Any, generator: torch.Generator | None, state: State, done: int, *, ahead: int = 0
    ) -> "Order":
        """The order that a state describes, after its first `done` batches; the global generators are unchanged."""
        kept = GlobalNumbers()
        try:
            _restore(state["begin"], sampler, generator)
            order = cls(sampler, generator, seed=state.get("seed"))  # earlier versions saved none
            _restore(state["first"], sampler, generator)
            order._ahead = ahead
            order._draw_up_to(done + ahead)
            for number in range(done):
                order.hand_over(number)
        finally:
            kept.restore()
        return order

    def state_dict(self) -> State | None:
        """What reproduces the order; None before its first batch was drawn."""
        if self._first is None:
            return None
        return {"begin": self._begin, "first": self._first, "seed": self.seed}

    def jobs(self, *, early: bool = False) -> Iterator[tuple[int, Any]]:
        """Yield jobs from the first batch that was not handed over; may be called again at any time.

        Args:
            early: Workers request jobs before torch's loader would, so generators must not show the draws yet.
        """
        for number in range(self._drawn - len(self._waiting), len(self._sampler)):
            while self._drawn <= number:
                if not self._draw(early=early):
                    return
            yield self._waiting[number - self._drawn + len(self._waiting)]

    def hand_over(self, number: int) -> None:
        """Record that the batch of this number, and those before it, were used."""
        while self._waiting and self._waiting[0][0] <= number:
            _, item = self._waiting.popleft()
            self._crc = None if self._crc is None else _crc_of(item, self._crc)
        self._draw_up_to(number + 1 + self._ahead)

    @property
    def crc(self) -> int | None:
        """Checksum of the items of the batches that were handed over; None if they are not numbers."""
        return self._crc

    def end(self) -> None:
        """Request one batch more than there are: the sampler's draws at its end belong to the epoch as well."""
        self._draw_up_to(inf if self._has_ended else self._tries + 1)

    def _draw_up_to(self, tries: float) -> None:
        """Bring the generators to where torch's loader leaves them after requesting this many batches."""
        while self._tries - len(self._early) < tries and (self._early or not self._has_ended):
            if not self._early:
                self._draw()
            elif (states := self._early.popleft()) is not None:
                self._set(states)

    def _draw(self, *, early: bool = False) -> bool:
        if self._has_ended:
            return False
        self._tries += 1
        if self._first is None:  # the first is requested when torch's loader would, whoever builds it
            self._first = self._captured()
            return self._drawn_one()
        # What follows an early draw is early, too, until the earlier ones are due.
        return self._drawn_early() if early or self._early else self._drawn_apart()

    def _drawn_early(self) -> bool:
        now = self._states()
        before = next((states for states in reversed(self._early) if states is not None), now)
        if before is not now:
            self._set(before)
        try:
            return self._drawn_apart()
        finally:
            after = self._states()
            is_same = all(map(torch.equal, before, after))
            self._early.append(None if is_same else after)
            if not is_same or before is not now:
                self._set(now)

    def _drawn_apart(self) -> bool:
        """Draw without a trace in the global generators."""
        if self._draws_once():
            return self._drawn_one()
        outside = GlobalNumbers()
        if self._own is None:
            GlobalNumbers.seed(self.seed)
        else:
            self._own.restore()
        try:
            return self._drawn_one()
        finally:
            self._own = GlobalNumbers()
            outside.restore()

    def _drawn_one(self) -> bool:
        try:
            item = next(self._items)
        except StopIteration:
            self._has_ended = True
            return False
        self._waiting.append((self._drawn, item))
        self._drawn += 1
        return True

    def _draws_once(self) -> bool:
        within = self._sampler.sampler if type(self._sampler) is BatchSampler else self._sampler
        return type(within) in _DRAW_ONCE

    def _captured(self) -> State:
        return {**GlobalNumbers().state_dict(), "generators": self._states()}

    def _states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _set(self, states: list[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


def _restore(state: State, sampler: Any, generator: torch.Generator | None) -> None:
    GlobalNumbers().load_state_dict(state).restore()
    restore_generators(state, sampler, generator)


def _crc_of(item: Any, crc: int) -> int | None:
    """The checksum of earlier batches, extended by one batch's numbers; None if they are not numbers."""
    try:
        numbers = np.asarray(item)
    except (TypeError, ValueError):  # ragged, or on a device
        return None
    if numbers.dtype.kind not in "biufU":
        return None
    return zlib.crc32(np.ascontiguousarray(numbers).tobytes(), crc)
