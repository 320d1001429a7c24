"""Batches of a stream of unknown length: packed window by window as its documents arrive, resumable anywhere.

Every rank reads the whole stream and takes its rows of every step, so that ranks need no communication and
none runs out of batches before the others.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

from lightning_memkit.data.batching.batch import PackedBatch
from lightning_memkit.data.batching.identity import differences, refuse_other_data, refuse_other_kind
from lightning_memkit.data.batching.planned import refuse_other_steps
from lightning_memkit.data.batching.progress import Progress
from lightning_memkit.data.batching.stream_batches import Position, Stream, StreamBatches, Turn
from lightning_memkit.data.loading.ahead import ahead
from lightning_memkit.data.loading.loader import LoaderOptions

_KEPT = 4  # positions kept: the one after the last batch, and those before it


class StreamLoader:
    """A stateful iterable of ``PackedBatch`` without a length; an ``iter`` is an epoch, or the rest of a resumed one.

    Resuming reads the stream again from its beginning, but does not tokenize what was done. With workers, one
    thread (not processes, each of which would read the whole stream) builds as many batches ahead as the
    workers would.

    Args:
        stream: The documents.
        options: ``batch_size`` rows a batch, or ``batch_tokens``; whole rows hold ``context`` tokens each.
        rank: The rank of this process.
        world_size: Number of processes that divide the rows.
    """

    def __init__(self, stream: Stream, options: LoaderOptions, *, rank: int = 0, world_size: int = 1) -> None:
        if options.padding != "longest":
            raise ValueError(
                f'padding={options.padding!r} sorts rows by length, which a stream does not know; take "longest".'
            )
        self.stream, self.options = stream, options
        self.rank, self.world_size = rank, world_size
        self.batch_size = options.batch_size or 2**31
        if options.batch_tokens is not None:
            self.batch_size = min(self.batch_size, options.batch_tokens // stream.context)
        if not self.batch_size:
            raise ValueError(
                f"batch_tokens={options.batch_tokens} is less than context={stream.context}; a batch holds at least "
                "one row. Raise it, or lower the context."
            )
        self._epoch = 0
        self._differences: list[str] = []
        self._begin = Position()
        self._positions: deque[Position] = deque([self._begin], maxlen=_KEPT)
        self._has_begun = False
        self._taken: int | None = None
        self._iteration = 0
        # Lightning calls `set_epoch` on `loader.batch_sampler.sampler`.
        self.batch_sampler = SimpleNamespace(sampler=self)

    @property
    def progress(self) -> Progress:
        """What was delivered to all ranks so far, in this epoch and earlier ones."""
        return self.position.before

    def go_on_after(self, loader: "StreamLoader") -> None:
        """Continue the counts of another loader of the same stream."""
        self._begin = replace(self._begin, before=loader.progress)
        self._positions = deque([self._begin], maxlen=_KEPT)

    def take(self) -> None:
        """Report that one more batch is used; from the first call on, the state is the position after the last one.

        For a trainer that draws a batch before it uses the previous one, as Lightning does with loaders
        without a length.
        """
        self._taken = self._begin.batches + 1 if self._taken is None else self._taken + 1

    @property
    def position(self) -> Position:
        """The loader's position."""
        if self._taken is None:
            return self._positions[-1]
        return next((seen for seen in self._positions if seen.batches == self._taken), self._positions[-1])

    def state_dict(self) -> dict[str, Any]:
        """The loader's position and the identity of its data: the same on every rank."""
        made_from = {"made_from": dict(self.stream.made_from)} if self.stream.made_from else {}
        where = {"epoch": self._epoch, "position": asdict(self.position)}
        return {**self._identity(), **made_from, **where}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the state was taken, on any number of ranks that have the same rows a step together.

        The documents that are read again are compared with the earlier ones before the first batch.

        Raises:
            ValueError: context, rows a step, seed, or an option that shapes a batch differs from then.
        """
        refuse_other_kind(state, is_stream=True)
        refuse_other_steps(
            state, replace(self.options, batch_size=self.batch_size, batch_tokens=None), self.world_size
        )
        refuse_other_data(state, self._identity(), self.stream.made_from)
        self._differences = differences(state.get("made_from") or {}, self.stream.made_from)
        position = state["position"]
        self._restart(state["epoch"], Position(**{**position, "before": Progress(**position["before"])}))

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch at its first batch, unless it is the current one."""
        if epoch != self._epoch:
            last = self.position
            counted = ("before", "truncated_documents", "truncated_tokens")
            self._restart(epoch, Position(**{name: getattr(last, name) for name in counted}))

    def __iter__(self) -> Iterator[PackedBatch]:
        if self._has_begun:
            self.set_epoch(self._epoch + 1)
        self._iteration += 1
        return self._batches(self._iteration)

    def _restart(self, epoch: int, position: Position) -> None:
        self._epoch, self._begin, self._has_begun, self._taken = epoch, position, False, None
        self._positions = deque([position], maxlen=_KEPT)

    def _batches(self, iteration: int) -> Iterator[PackedBatch]:
        if self._begin.is_end:
            self.set_epoch(self._epoch + 1)
        self._has_begun = True
        turn = Turn(
            rank=self.rank,
            ranks=self.world_size,
            batch_size=self.batch_size,
            drop_last=self.options.drop_last,
        )
        batches = StreamBatches(self.stream, turn, self._epoch, self._begin, self._differences)
        options = self.options
        built = (
            ahead(batches, options.num_workers * options.prefetch, name="memkit stream")
            if options.num_workers
            else batches
        )
        for batch, position in built:
            if iteration == self._iteration:
                self._positions.append(position)
            yield batch.pin_memory() if options.pin_memory else batch
        if iteration == self._iteration:
            self._positions[-1] = replace(self._positions[-1], is_end=True)

    def _identity(self) -> dict[str, Any]:
        stream = self.stream
        return {
            "seed": stream.seed,
            "context": stream.context,
            "rows_per_step": self.batch_size * self.world_size,
            "long_documents": stream.long_documents,
            "pad_id": stream.pad_id,
            "multiple_of": stream.multiple_of,
            "work_limit": None if stream.work_limit is None else repr(stream.work_limit),
            "drop_last": self.options.drop_last,
        }
