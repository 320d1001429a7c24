"""Wraps any map-style ``DataLoader``: its workers may change between batches, and its position can be saved."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_memkit.data.batching.identity import differences, identity_of_sampling
from lightning_memkit.data.batching.random_numbers import State, generators_of, restore_generators
from lightning_memkit.data.batching.sampling_order import Order
from lightning_memkit.data.loading.ahead import each_in_a_list
from lightning_memkit.data.loading.host_memory import HostMemory
from lightning_memkit.data.loading.load_times import LoadTimes
from lightning_memkit.data.loading.seeded_build import SeededBuild, next_seed, seeded
from lightning_memkit.data.loading.worker_batches import Built, WorkerBatches, WorkerOptions, started_for


def why_not_resumable(loader: Any) -> str | None:
    """The reason why a loader can't be wrapped in a `ResumableLoader`, or None."""
    kind = type(loader).__name__
    if not isinstance(loader, DataLoader):
        return f"{kind} is no torch DataLoader"
    methods = ("__iter__", "_get_iterator")
    own = any(getattr(type(loader), name) is not getattr(DataLoader, name) for name in methods)
    if own or hasattr(loader, "state_dict"):
        return f"{kind} iterates in a way of its own"
    if isinstance(loader.dataset, IterableDataset):
        return f"{type(loader.dataset).__name__} is an IterableDataset, of which every worker reads its own share"
    if not getattr(loader, "in_order", True):
        return "in_order=False gives batches as they come"
    sampler = _sampler_of(loader)
    if not hasattr(sampler, "__len__"):
        return f"{type(sampler).__name__} has no length"
    return None


class ResumableLoader(DataLoader[Any]):
    """A ``DataLoader`` whose batches and their order are the same for any number of workers, and after a resume.

    The batches come in the order of the wrapped loader. Its data set, sampler, collate function, generator,
    start method of workers and everything else stay. A data set's random draws (augmentation) depend only on
    the epoch, the batch's number and the rank: each batch has its own random stream, so that the training's
    random numbers do not change with the workers. This takes a fraction of a millisecond a batch.

    Args:
        loader: A loader of a map-style data set, with a length; see `why_not_resumable`.
        rank: The rank of this process: each rank augments with other random numbers.
        ranks: Number of processes.

    Attributes:
        times: Is told how long batches take to build, if set.
        on_the_way: Applied to the iterator of batches, such as a copy to the device one batch ahead.
        epoch_batches: Number of batches after which the loop ends an epoch, if the loader does not end before.
    """

    def __init__(self, loader: DataLoader[Any], *, rank: int = 0, ranks: int = 1) -> None:
        # Attributes are copied, because a DataLoader's own arguments contradict each other (a sampler and a
        # batch sampler).
        vars(self).update(vars(loader))
        vars(self)["_iterator"] = getattr(loader._iterator, "_base_seed", None)
        self.times: LoadTimes | None = None
        self.on_the_way: Callable[[Iterator[Any]], Iterator[Any]] = iter
        self.epoch_batches: float = math.inf
        self._rank, self._ranks = rank, ranks
        self._as_made = WorkerOptions(
            num_workers=loader.num_workers,
            prefetch=loader.prefetch_factor or 2,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            context=loader.multiprocessing_context,
            is_persistent=loader.persistent_workers,
        )
        self._workers = self._as_made
        self._standing: tuple[WorkerOptions, WorkerBatches] | None = None
        self._order: Order | None = None
        self._to_resume: State | None = None
        self._done = self._iteration = 0
        self._has_begun = False

    def __getstate__(self) -> dict[str, Any]:
        """A copy continues where this one stands, with its own workers."""
        within = self._to_resume
        if self._order is not None and self._is_within(self._done):
            within = self.state_dict()
        # Lightning records loaders' arguments, permanently if a user's loader has raised: including workers
        # and iterators.
        kept = {name: value for name, value in vars(self).items() if not name.startswith("__pl_")}
        run = {
            "_standing": None,
            "_iterator": self._seed_after(),
            "_order": None,
            "times": None,
            "on_the_way": iter,
        }
        return {**kept, **run, "_to_resume": within, "_has_begun": False}

    def set_workers(self, num_workers: int, prefetch: int, room: HostMemory | None = None) -> None:
        """Change the number of workers from the next batch on; batches and their order stay the same.

        Args:
            num_workers: Processes; 0 builds in this one.
            prefetch: Batches that each worker builds ahead.
            room: Ignored, because a batch is built as a whole.
        """
        if (num_workers, prefetch) != (self._workers.num_workers, self._workers.prefetch):
            self._workers = replace(self._workers, num_workers=num_workers, prefetch=prefetch)
            self.num_workers, self.prefetch_factor = num_workers, prefetch if num_workers else None

    def set_pin_memory(self, pin_memory: bool) -> None:
        """From the next batch on, put batches into page-locked memory or not; needs an accelerator."""
        if pin_memory != self._workers.pin_memory:
            self._workers = replace(self._workers, pin_memory=pin_memory)
            self.pin_memory = pin_memory

    @property
    def built(self) -> Any:
        """The object that workers get: the data set and the function that makes batches of it."""
        return SeededBuild(self.dataset, self.collate_fn, self.batch_sampler is not None, self._rank)

    def state_dict(self) -> State:
        """The loader's position: how many batches are done, and what reproduces their order; 30 KB."""
        if self._to_resume is not None:
            return self._to_resume
        order = crc = None
        if self._order is not None and self._is_within(self._done):
            order, crc = self._order.state_dict(), self._order.crc
        return {
            "batches_done": self._done if order is not None else 0,
            "batches": len(self),
            **identity_of_sampling(self, self._ranks),
            "of_rank": [self._rank, self._ranks],
            "order": order,
            "order_crc": crc,
            "epoch": getattr(self._of_epochs(), "epoch", None),
            "generators": [one.get_state() for one in generators_of(_sampler_of(self), self.generator)],
            "seed": self._seed_after(),
        }

    def load_state_dict(self, state: State) -> None:
        """Continue where the state was taken; a state `with_other_ranks` contains that of this rank.

        Whether the sampler reproduces the order is checked, with a ValueError, when the first batch is drawn.

        Raises:
            ValueError: it was taken within an epoch of another number of batches or samples, or of another sampler.
        """
        others = state.get("others", ())
        if len(others) + 1 == self._ranks and self._rank:
            state = others[self._rank - 1]
        if state["batches_done"] and state["batches"] != len(self):
            raise ValueError(
                f"The loader's state is of an epoch of {state['batches']} batches, and this one has {len(self)}, so "
                "its position means nothing here; resume with the same data and batch size, or load the weights alone."
            )
        now = identity_of_sampling(self, self._ranks)
        if state["batches_done"] and (differing := differences(state, now)):
            raise ValueError(
                f"The loader's state is of another order of samples ({'; '.join(differing)}), so its position means "
                "nothing here; resume with the same data, kind of sampler and samples a step over all ranks (of one "
                "rank and several the samplers differ), or load the weights alone."
            )
        self._to_resume, self._order, self._has_begun = state, None, False
        self._keep_seed(state.get("seed"))
        self._done = state["batches_done"]
        # Restored now, because Lightning may recreate this epoch's loader from the same generators.
        if not self._done:
            restore_generators(state, _sampler_of(self), self.generator)

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # Lightning may request an iterator twice before it draws from one: that is still the same epoch.
        if self._has_begun:
            self._keep_seed(self._seed_after())
            self._done, self._has_begun = 0, False
        if self._to_resume is None:
            self._order = self._new_order()
        self._iteration += 1
        return self._batches(self._iteration)

    def _batches(self, iteration: int) -> Iterator[Any]:
        # This runs at the first `next`, because the epoch may be set between `iter` and then.
        order = self._begun_order()
        done = self._done
        self._has_begun = True
        while done < len(self):
            workers = self._workers
            for held in each_in_a_list(self.on_the_way(self._built(order))):
                order.hand_over(done)
                done += 1
                if iteration == self._iteration:  # ignore an iterator that a newer one has replaced
                    self._done = done
                yield held.pop()
                if self._workers is not workers:  # other workers build the rest
                    break
            else:
                break
        order.end()

    def _begun_order(self) -> Order:
        state, self._to_resume = self._to_resume, None
        sampler = _sampler_of(self)
        if state is not None and state["order"] is not None and self._is_within(state["batches_done"]):
            # A trainer that was stopped within an epoch may count it as done and have announced the next.
            if state["epoch"] is not None:
                self._of_epochs().set_epoch(state["epoch"])
            self._order = Order.resumed(
                sampler, self.generator, state["order"], state["batches_done"], ahead=self._ahead
            )
            self._keep_seed(self._order.seed)
            self._refuse_other_order(state, self._order)
        elif state is not None or self._order is None:
            if state is not None:
                restore_generators(state, sampler, self.generator)
            self._done = 0
            self._order = self._new_order()
        return self._order

    def _new_order(self) -> Order:
        order = Order(_sampler_of(self), self.generator, ahead=self._ahead, seed=vars(self)["_iterator"])
        self._keep_seed(order.seed)
        return order

    @property
    def _ahead(self) -> int:
        """The batches that torch's loader, with the workers it was made with, draws ahead."""
        return self._as_made.num_workers * self._as_made.prefetch

    def _keep_seed(self, seed: int | None) -> None:
        """Keep the seed of workers that stay.

        It is kept under the name of torch's persistent iterator, which Lightning resets when a fit ends: from
        then on torch draws a seed anew.
        """
        is_persistent = self._as_made.is_persistent and self._as_made.num_workers > 0
        vars(self)["_iterator"] = seed if is_persistent else None

    def _seed_after(self) -> int | None:
        """The seed of the next epoch, or of this one before its first batch; None: it is drawn."""
        seed = vars(self)["_iterator"]
        return next_seed(seed) if self._has_begun and seed is not None else seed

    def _refuse_other_order(self, state: State, order: Order) -> None:
        """Raise if the sampler, drawn again, gives other samples for the batches that are done."""
        then, is_this_ranks = state.get("order_crc"), state.get("of_rank") == [self._rank, self._ranks]
        if is_this_ranks and None not in (then, order.crc) and then != order.crc:
            raise ValueError(
                f"The sampler gives other samples for the epoch's first {state['batches_done']} batch(es) than those "
                "that were trained on, so continuing after them would repeat some and skip others. Resume with "
                "the sampler's options, weights, seed and generator of then; one that keeps a counter, or draws from "
                "a generator that is not torch's, can be resumed at an epoch's end only."
            )

    def _is_within(self, done: int) -> bool:
        """Whether an epoch has begun and not ended after this many batches."""
        return 0 < done < min(len(self), self.epoch_batches)

    def _of_epochs(self) -> Any:
        """The sampler whose order follows from the epoch, such as a `DistributedSampler`; None if there is none."""
        samplers = (self.sampler, getattr(self.batch_sampler, "sampler", None))
        return next((sampler for sampler in samplers if hasattr(sampler, "set_epoch")), None)

    def _built(self, order: Order) -> Iterator[Any]:
        return map(
            self._noted,
            self._standing_workers(order.seed).batches(seeded(order, early=self._workers.num_workers > 0)),
        )

    def _noted(self, built: Built) -> Any:
        if self.times is not None and self._workers.num_workers:
            self.times.built(built.seconds, built.cpu_seconds)
        return built.batch

    def _standing_workers(self, seed: int) -> WorkerBatches:
        """The workers of the last epoch if they are persistent, otherwise new ones."""
        options = self._workers
        if self._standing is None or self._standing[0] is not options or not options.is_persistent:
            on_start = started_for(self.dataset, self.worker_init_fn)
            self._standing = (
                options,
                WorkerBatches(self.built, replace(options, on_start=on_start, seed=seed)),
            )
        return self._standing[1]


def with_other_ranks(states: list[State]) -> State:
    """The state of the first rank, with those of the others inside: each may draw in its own way."""
    return {**states[0], "others": states[1:]}


def _sampler_of(loader: DataLoader[Any]) -> Any:
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler
