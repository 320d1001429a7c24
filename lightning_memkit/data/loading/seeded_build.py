"""Builds each batch with a random stream of its own, so that no draw depends on which process builds it."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import get_worker_info

from lightning_memkit.data.batching.random_numbers import GlobalNumbers
from lightning_memkit.data.batching.sampling_order import Order
from lightning_memkit.data.loading.worker_batches import Job


class SeededBuild:
    """Builds a batch from its samples, with its own random stream."""

    def __init__(self, dataset: Any, collate_fn: Any, samples: bool, rank: int) -> None:
        self.dataset, self.collate_fn, self.samples, self.rank = dataset, collate_fn, samples, rank

    def __call__(self, job: Job) -> Any:
        """The batch of a job; in this process the global generators are unchanged."""
        number, (seed, asked) = job
        kept = GlobalNumbers() if get_worker_info() is None else None
        mixed = np.random.SeedSequence([seed, self.rank, number]).generate_state(1, np.uint64)
        GlobalNumbers.seed(int(mixed[0]) >> 1)
        try:
            return self.collate_fn(self._samples(asked) if self.samples else self.dataset[asked])
        finally:
            if kept is not None:
                kept.restore()

    def _samples(self, numbers: list[Any]) -> Any:
        together = getattr(self.dataset, "__getitems__", None)
        return together(numbers) if together else [self.dataset[number] for number in numbers]


def seeded(order: Order, *, early: bool) -> Iterator[Job]:
    """The jobs of an order with its seed; see `Order.jobs`."""
    for number, item in order.jobs(early=early):
        yield number, (order.seed, item)


def next_seed(seed: int) -> int:
    """The seed of the epoch after one whose workers stay: torch draws none for it, and it must differ."""
    return int(np.random.SeedSequence([seed, 1]).generate_state(1, np.uint64)[0]) >> 1
