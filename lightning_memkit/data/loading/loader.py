"""Batches of packed rows that resume where they stopped: the state is a few integers, the same on every rank.

The order of an epoch follows from (seed, epoch, rows) alone, so every rank computes it by itself, without
communication. Nothing draws from torch's global random generator: a resumed run draws what the uninterrupted
run would have drawn.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any

from lightning_memkit.data.batching.batch import PackedBatch
from lightning_memkit.data.batching.batch_plan import Epoch, Ordered, PlanOptions
from lightning_memkit.data.batching.identity import refuse_other_data, refuse_other_kind, with_usual
from lightning_memkit.data.batching.packed_jobs import EpochBatches, JobParts, build
from lightning_memkit.data.batching.packed_rows import PackedRows
from lightning_memkit.data.batching.planned import Planned, planned, planned_as_saved, refuse_other_steps
from lightning_memkit.data.batching.progress import Progress
from lightning_memkit.data.loading.ahead import each_in_a_list
from lightning_memkit.data.loading.host_memory import HostMemory, loader_memory, tokens_a_part
from lightning_memkit.data.loading.load_times import LoadTimes
from lightning_memkit.data.loading.worker_batches import Built, WorkerBatches, WorkerOptions

__all__ = ["LoaderOptions", "PackedLoader", "PackedRows"]

# Defaults that are left out of a state, to keep it small.
_USUAL = {
    "shuffle": True,
    "padding": "longest",
    "drop_last": False,
    "pad_id": 0,
    "multiple_of": 1,
    "work_limit": None,
}


@dataclass(frozen=True, kw_only=True)
class LoaderOptions(PlanOptions):
    """How a loader assigns its rows and builds its batches.

    Attributes:
        num_workers: Processes that build batches ahead; 0 builds them in this one.
        prefetch: Batches that each worker builds ahead.
        pin_memory: Puts batches into page-locked memory, for faster copies to an accelerator; needs one.
        room: The most host memory for batches under way; if they would exceed it, workers send parts of a
            batch, which this process joins. None: no limit.
    """

    num_workers: int = 0
    prefetch: int = 2
    pin_memory: bool = False
    room: HostMemory | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_workers < 0:
            raise ValueError(f"num_workers={self.num_workers} is below 0; 0 builds batches in this process.")
        if self.prefetch < 1:
            raise ValueError(
                f"prefetch={self.prefetch} is below 1; a worker builds one batch ahead at the least."
            )


class PackedLoader:
    """A sized, stateful iterable of ``PackedBatch``; an ``iter`` is an epoch, or the rest of a resumed one.

    Each rank gets other rows and the same number of batches. The rows left for the last step are used, too,
    in smaller batches. If they are fewer than the ranks, the step before gives up as many rows as are needed,
    or rows of several documents are cut in two.

    Args:
        rows: The rows.
        options: How they become batches.
        rank: The rank of this process.
        world_size: Number of processes that divide the rows.

    Attributes:
        times: Is told how long workers take, if set.
        keeps_workers: Whether workers stay from one epoch to the next, until `close`.
        on_the_way: Applied to the iterator of batches, such as a copy to the device one batch ahead.

    Raises:
        ValueError: there are fewer rows than ranks, or than a whole step with ``drop_last``, or a row is
            longer than ``batch_tokens``.
    """

    def __init__(
        self, rows: PackedRows, options: LoaderOptions, *, rank: int = 0, world_size: int = 1
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} is outside 0 to {world_size - 1} (world_size={world_size}).")
        self.options = options
        self.rank = rank
        self.world_size = world_size
        self._standing: tuple[LoaderOptions, WorkerBatches] | None = None
        self._given_rows = rows
        self._take_on(planned(rows, options, world_size))
        self.planned.refuse_no_step(options)
        self._epoch = 0
        self._batches_done = 0
        self._has_begun = False  # whether a batch of this epoch was drawn since it began or was resumed
        self._iteration = 0
        self.times: LoadTimes | None = None
        self.keeps_workers = False
        self.on_the_way: Callable[[Iterator[PackedBatch]], Iterator[PackedBatch]] = iter
        self._planned: Epoch = Ordered.nothing()
        self._progress, self._counted_steps = Progress(), 0
        # Lightning calls `set_epoch` on `loader.batch_sampler.sampler`.
        self.batch_sampler = SimpleNamespace(sampler=self)

    def __len__(self) -> int:
        return self.plan.steps

    @property
    def dropped_rows(self) -> int:
        """Rows of every epoch that no rank gets."""
        return self.plan.dropped_rows

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch at its first batch, unless it is the current one."""
        if epoch != self._epoch:
            _ = self.progress  # counts the epoch that is left
            self._epoch, self._batches_done, self._has_begun, self._counted_steps = epoch, 0, False, 0

    def set_workers(self, num_workers: int, prefetch: int, room: HostMemory | None = None) -> None:
        """Change the number of workers from the next batch on; batches and their order stay the same.

        Args:
            num_workers: Processes; 0 builds in this one.
            prefetch: Batches that each worker builds ahead.
            room: The most host memory for batches under way, unless the options set it.
        """
        if (num_workers, prefetch) != (self.options.num_workers, self.options.prefetch):
            room = self.options.room or room
            self.options = replace(self.options, num_workers=num_workers, prefetch=prefetch, room=room)
            self.close()

    def close(self) -> None:
        """End workers that were kept."""
        self._standing = None

    def state_dict(self) -> dict[str, Any]:
        """The loader's position, what it has delivered, and the identity of its data: the same on every rank."""
        where = {"ranks": self.planned.ranks, "epoch": self._epoch, "batches_done": self._batches_done}
        if self.planned.least_rows:
            where["least_rows"] = self.planned.least_rows
        identity = self.planned.identity(self.options)
        identity = {name: value for name, value in identity.items() if _USUAL.get(name) != value}
        made_from = {"made_from": dict(self.rows.made_from)} if self.rows.made_from else {}
        return {**identity, **made_from, **where, "dealt": vars(self.progress).copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the state was taken; another number of ranks divides the steps of the earlier ranks.

        Raises:
            ValueError: documents, packing, order, or the rows or tokens of a step differ from then, or this
                many ranks can't divide some step.
        """
        refuse_other_kind(state, is_stream=False)
        state = with_usual(state, _USUAL)
        refuse_other_steps(state, self.options, self.world_size)
        done = state["batches_done"]
        now = planned_as_saved(self._given_rows, self.options, self.world_size, state)
        refuse_other_data(state, now.identity(self.options), now.rows.made_from)
        now.refuse_begun_last_steps(state)
        self._take_on(now)
        self._epoch, self._batches_done, self._has_begun = state["epoch"], done, False
        self._progress = Progress(**state["dealt"])
        self._counted_steps = self._batches_done

    @property
    def progress(self) -> Progress:
        """What was delivered to all ranks so far, in all epochs; takes microseconds per batch since the last call."""
        steps = range(self._counted_steps, self._batches_done)
        self._counted_steps = self._batches_done
        self._progress = self._progress.plus(self._dealt(self._planned, steps))
        return self._progress

    def go_on_after(self, loader: "PackedLoader") -> None:
        """Continue the counts of another loader of the same rows, and keep its plan."""
        self._progress = loader.progress
        self._take_on(loader.planned)

    @property
    def resumed_on_other_ranks(self) -> str | None:
        """A message if other ranks than these began the plan; None if there is nothing to say."""
        return self.planned.note(self.options, self._epoch, self._batches_done)

    @property
    def memory(self) -> HostMemory:
        """The most host memory that batches under way use."""
        return loader_memory(
            self.plan.most_tokens,
            num_workers=self.options.num_workers,
            prefetch=self.options.prefetch,
            tokens_a_part=self._part,
            pinned=self.options.pin_memory,
        )

    def _dealt(self, epoch: Epoch, steps: range) -> Progress:
        dealt = Progress()
        for step in steps:
            for rank in range(self.world_size):
                dealt = dealt.plus(self.rows.counted(epoch.batch(step, rank)))
        return dealt

    def __iter__(self) -> Iterator[PackedBatch]:
        # Lightning may request an iterator twice before it draws from one: that is still the same epoch.
        if self._has_begun:
            self.set_epoch(self._epoch + 1)
        self._iteration += 1
        return self._batches(self._iteration)

    def _batches(self, iteration: int) -> Iterator[PackedBatch]:
        # This runs at the first `next`, because the epoch may be set between `iter` and then.
        if self._batches_done >= len(self):
            self.set_epoch(self._epoch + 1)
        self._has_begun = True
        done, self._planned = self._batches_done, self.plan.epoch(self._epoch)
        while done < len(self):
            options = self.options
            built = self._built(EpochBatches(self._planned, self.rank, range(done, len(self))))
            for held in each_in_a_list(self.on_the_way(built)):
                done += 1
                if iteration == self._iteration:  # ignore an iterator that a newer one has replaced
                    self._batches_done = done
                yield held.pop()
                if self.options is not options:  # other workers build the rest
                    break

    def _built(self, batches: EpochBatches) -> Iterator[PackedBatch]:
        options = self.options
        if options.num_workers == 0:
            for _, rows in batches:
                yield self.rows[rows].pin_memory() if options.pin_memory else self.rows[rows]
            return
        parts = JobParts(batches, self.rows, self._part) if self._part < self.plan.most_tokens else None
        workers = self._workers(pin_memory=options.pin_memory and parts is None)
        if parts is None:
            yield from map(self._noted_batch, workers.batches(batches))
            return
        built = workers.batches(parts)
        for _, rows in batches:
            of_batch = self._noted(list(islice(built, len(parts.of(rows)))))
            yield PackedBatch.joined(of_batch, len(rows), pin_memory=options.pin_memory)

    def _workers(self, *, pin_memory: bool) -> WorkerBatches:
        if self._standing is not None and self._standing[0] is self.options and self.keeps_workers:
            return self._standing[1]
        workers = WorkerBatches(
            partial(build, self.rows),
            WorkerOptions(
                num_workers=self.options.num_workers,
                prefetch=self.options.prefetch,
                pin_memory=pin_memory,
                seed=self.options.seed,
                is_persistent=self.keeps_workers,
                receives_ahead=True,
            ),
        )
        self._standing = (self.options, workers) if self.keeps_workers else None
        return workers

    def _noted_batch(self, built: Built) -> PackedBatch:
        return self._noted([built])[0]

    def _noted(self, parts: list[Built]) -> list[PackedBatch]:
        if self.times is not None:
            self.times.built(sum(part.seconds for part in parts), sum(part.cpu_seconds for part in parts))
        return [part.batch for part in parts]

    @property
    def _part(self) -> int:
        """The most tokens that a worker sends at once."""
        options, most = self.options, self.plan.most_tokens
        if options.room is None:
            return most
        return tokens_a_part(
            most,
            self.rows.longest_batch,
            options.room,
            num_workers=options.num_workers,
            prefetch=options.prefetch,
            pinned=options.pin_memory,
        )

    def _take_on(self, now: Planned) -> None:
        self.close()  # workers hold the old rows
        self.planned, self.rows, self.plan = now, now.rows, now.plan
