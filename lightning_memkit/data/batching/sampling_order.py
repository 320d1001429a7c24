"""The order of an epoch's batches from a sampler: the same for any number of workers, and reproduced by a resume.

A sampler draws from the global random generators, or from a generator of the loader. Workers request batches
ahead of time, so that what is drawn, and when, depends on their number. Here the first batch is drawn when
torch's loader would draw it. The sampler's draws for the others, if any, come from a random stream of its
own.
"""

import random
import zlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

State = dict[str, Any]
# These draw from the global generators only for an epoch's first batch.
_DRAW_ONCE = (
    SequentialSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
)


class GlobalNumbers:
    """The current states of Python's, NumPy's and torch's global random generators on the host."""

    def __init__(self) -> None:
        self._python, self._torch = random.getstate(), torch.get_rng_state()
        self._numpy: Any = np.random.get_state()

    def restore(self) -> None:
        """Restore the states."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)

    @staticmethod
    def seed(seed: int) -> None:
        """Seed all three; the generators of devices stay as they are."""
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)

    def state_dict(self) -> State:
        """The states as tensors and plain numbers."""
        version, words, gauss = self._python
        state: State = {
            "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
            "torch": self._torch,
        }
        # Otherwise someone replaced NumPy's generator, which is left alone.
        if isinstance(self._numpy, tuple):
            name, key, *rest = self._numpy
            state["numpy"] = [name, torch.from_numpy(np.asarray(key, dtype=np.int64)), *rest]
        return state

    def load_state_dict(self, state: State) -> "GlobalNumbers":
        """Replace the stored states; returns itself."""
        version, words, gauss = state["python"]
        self._python, self._torch = (version, tuple(words.tolist()), gauss), _bytes(state["torch"])
        if "numpy" in state:
            name, key, *rest = state["numpy"]
            self._numpy = (name, key.cpu().numpy().astype(np.uint32), *rest)
        return self


class Order:
    """An epoch's batches by number, and the sampler's items that each is built from.

    Args:
        sampler: Yields the items that batches are built from; has a length.
        generator: The loader's generator; None: the global ones.
        draws_at_once: Draw the first batch now, as a loader with workers does.

    Attributes:
        seed: The seed that torch's loader would have given its workers.
    """

    def __init__(
        self, sampler: Any, generator: torch.Generator | None, *, draws_at_once: bool = False
    ) -> None:
        self._sampler, self._generator = sampler, generator
        self._drawn, self._has_ended = 0, False
        self._crc: int | None = 0  # checksum of the items handed over; None if their kind has none
        self._waiting: deque[tuple[int, Any]] = deque()  # drawn, but not handed over yet
        self._own: GlobalNumbers | None = None  # state of the sampler's own stream
        self._generators = generators_of(sampler, generator)
        self._begin = self._captured()
        self._items = iter(sampler)
        self.seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
        self._first: State | None = None
        if draws_at_once:
            self._draw()

    @classmethod
    def resumed(cls, sampler: Any, generator: torch.Generator | None, state: State, done: int) -> "Order":
        """The order that a state describes, after its first `done` batches; the global generators are unchanged."""
        kept = GlobalNumbers()
        try:
            _restore(state["begin"], sampler, generator)
            order = cls(sampler, generator)
            _restore(state["first"], sampler, generator)
            for number in range(done):
                order._draw()
                order.hand_over(number)
        finally:
            kept.restore()
        return order

    def state_dict(self) -> State | None:
        """What reproduces the order; None before its first batch was drawn."""
        return None if self._first is None else {"begin": self._begin, "first": self._first}

    def jobs(self) -> Iterator[tuple[int, Any]]:
        """Yield jobs from the first batch that was not handed over; may be called again at any time."""
        for number in range(self._drawn - len(self._waiting), len(self._sampler)):
            while self._drawn <= number:
                if not self._draw():
                    return
            yield self._waiting[number - self._drawn + len(self._waiting)]

    def hand_over(self, number: int) -> None:
        """Record that the batch of this number, and those before it, were used."""
        while self._waiting and self._waiting[0][0] <= number:
            _, item = self._waiting.popleft()
            self._crc = None if self._crc is None else _crc_of(item, self._crc)

    @property
    def crc(self) -> int | None:
        """Checksum of the items of the batches that were handed over; None if they are not numbers."""
        return self._crc

    def end(self) -> None:
        """Request one batch more than there are: the sampler's draws at its end belong to the epoch as well."""
        if not self._has_ended:
            self._has_ended = True
            self._draw()

    def _draw(self) -> bool:
        if self._first is None:
            self._first = self._captured()
            return self._drawn_one()
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
            return False
        self._waiting.append((self._drawn, item))
        self._drawn += 1
        return True

    def _draws_once(self) -> bool:
        within = self._sampler.sampler if type(self._sampler) is BatchSampler else self._sampler
        return type(within) in _DRAW_ONCE

    def _captured(self) -> State:
        own = [generator.get_state() for generator in self._generators]
        return {**GlobalNumbers().state_dict(), "generators": own}


def generators_of(sampler: Any, generator: torch.Generator | None) -> list[torch.Generator]:
    """The torch generators that may determine an order: those of the loader, the sampler and samplers inside."""
    found = [] if generator is None else [generator]
    waiting, seen = deque([sampler]), set()
    while waiting:
        within = waiting.popleft()
        if id(within) in seen:
            continue
        seen.add(id(within))
        values = list(getattr(within, "__dict__", {}).values())
        drawn_from = [value for value in values if isinstance(value, torch.Generator)]
        found += [one for one in drawn_from if all(one is not other for other in found)]
        # Lightning's wrapper of a sampler for several ranks keeps it in a data set.
        waiting += [value for value in values if isinstance(value, Sampler) or hasattr(value, "_sampler")]
    return found


def restore_generators(state: State, sampler: Any, generator: torch.Generator | None) -> None:
    """Restore the states of the generators that `generators_of` finds; other generators are not known."""
    alone = state.get("generator")  # earlier versions saved only the loader's
    states = state.get("generators", [] if alone is None else [alone])
    for one, saved in zip(generators_of(sampler, generator), states, strict=False):
        one.set_state(_bytes(saved))


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


def _bytes(state: Tensor) -> Tensor:
    return state.cpu().to(torch.uint8)  # a `map_location` may have moved it
