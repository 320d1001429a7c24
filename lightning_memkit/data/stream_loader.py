"""Batches of a stream whose end is not known: packed window by window as its documents come, resumable anywhere.

Every rank reads the whole stream and takes its rows of every step, so ranks need not talk to each other, and none
runs out of batches before the others.
"""

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import groupby, pairwise
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np

from lightning_memkit.data.batch import PackedBatch
from lightning_memkit.data.collate import collate, rounded_length
from lightning_memkit.data.layout import Packing
from lightning_memkit.data.loader import LoaderOptions
from lightning_memkit.data.pieces import LongDocuments
from lightning_memkit.data.progress import Progress
from lightning_memkit.data.store import TokenStore, joined
from lightning_memkit.data.streaming import StreamPacker, StreamWindow

_Item = TypeVar("_Item")
_KEPT = 4  # positions: the one after the last batch, and after those before it


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Documents as they come.

    Attributes:
        read: Stores of consecutive documents from a number on, for an epoch: ``read(epoch, first_document)``. A
            document that is not wanted has no tokens, so that numbers stay.
        context: Tokens a row can hold.
        long_documents: What becomes of a document longer than that.
        seed: Of the order of rows within windows.
        pad_id: The token that fills a row's end.
        multiple_of: Rounds a batch's length up, but never beyond the context.
    """

    read: Callable[[int, int], Iterator[TokenStore]]
    context: int
    long_documents: LongDocuments = "error"
    seed: int = 0
    pad_id: int = 0
    multiple_of: int = 1


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where an epoch stands behind a batch.

    Attributes:
        batches: Steps that are done.
        first_document: The first document of the window whose rows come next.
        rows: Rows of that window that are done.
        before: What all ranks were dealt so far, in this epoch and those before it.
        truncated_documents: In the windows so far, over all epochs.
        truncated_tokens: In the windows so far, over all epochs.
        is_end: No batch of the epoch is left.
    """

    batches: int = 0
    first_document: int = 0
    rows: int = 0
    before: Progress = Progress()
    truncated_documents: int = 0
    truncated_tokens: int = 0
    is_end: bool = False


@dataclass(frozen=True, kw_only=True)
class _Row:
    store: TokenStore
    packing: Packing
    number: int
    first_document: int
    truncated: tuple[int, int]  # documents and tokens, by the end of this row's window

    @property
    def tokens(self) -> int:
        return int(self.packing.row_tokens[self.number])

    @property
    def documents(self) -> int:
        """Documents that begin in it."""
        first, last = self.packing.offsets[self.number : self.number + 2]
        return int(np.count_nonzero(self.packing.starts[first:last] == 0))


class StreamLoader:
    """A stateful iterable of ``PackedBatch`` without a length; an ``iter`` is an epoch, or the rest of a resumed one.

    Resuming reads the stream again from its beginning, without tokenising what was done. With workers one thread (not
    processes, of which each would read the whole stream) builds as many batches ahead as those would.

    Args:
        stream: What to read.
        options: ``batch_size`` rows a batch, or ``batch_tokens``; whole rows hold ``context`` tokens each.
        rank: Of this process.
        world_size: Number of processes that share the rows.
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
        self._begin = Position()
        self._positions: deque[Position] = deque([self._begin], maxlen=_KEPT)
        self._has_begun = False
        self._taken: int | None = None
        self._iteration = 0
        # Lightning announces epochs to `loader.batch_sampler.sampler`.
        self.batch_sampler = SimpleNamespace(sampler=self)

    @property
    def progress(self) -> Progress:
        """What all ranks were dealt so far, in this epoch and those before it."""
        return self.position.before

    def go_on_after(self, progress: Progress) -> None:
        """Counts on from what another loader has dealt."""
        self._begin = replace(self._begin, before=progress)
        self._positions = deque([self._begin], maxlen=_KEPT)

    def take(self) -> None:
        """Says that one more batch is used; from the first call on, the state is that behind the last such batch.

        For a trainer that draws a batch before it uses the one before: Lightning does where there is no length.
        """
        self._taken = self._begin.batches + 1 if self._taken is None else self._taken + 1

    @property
    def position(self) -> Position:
        """Where the loader stands."""
        if self._taken is None:
            return self._positions[-1]
        return next((seen for seen in self._positions if seen.batches == self._taken), self._positions[-1])

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands: the same on every rank."""
        return {**self._identity(), "epoch": self._epoch, "position": asdict(self.position)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where the state was taken.

        Raises:
            ValueError: context, batch size, number of ranks or seed differ from then.
        """
        now = self._identity()
        differing = [
            f"{name}: {state.get(name)} then, {now[name]} now" for name in now if state.get(name) != now[name]
        ]
        if differing:
            raise ValueError(
                f"The loader's state is of another stream ({'; '.join(differing)}), so its position means "
                "nothing here; resume with the same data options and ranks, or load the weights alone."
            )
        position = state["position"]
        self._restart(state["epoch"], Position(**{**position, "before": Progress(**position["before"])}))

    def set_epoch(self, epoch: int) -> None:
        """Begins this epoch at its first batch, unless it is the present one."""
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
        batches = _StreamBatches(self, self._epoch, self._begin)
        options = self.options
        built = _ahead(batches, options.num_workers * options.prefetch) if options.num_workers else batches
        for batch, position in built:
            if iteration == self._iteration:
                self._positions.append(position)
            yield batch.pin_memory() if options.pin_memory else batch
        if iteration == self._iteration:
            self._positions[-1] = replace(self._positions[-1], is_end=True)

    def _identity(self) -> dict[str, int]:
        return {
            "seed": self.stream.seed,
            "context": self.stream.context,
            "rows_per_step": self.batch_size * self.world_size,
        }


class _StreamBatches:
    """This rank's batches of an epoch, each with the position behind it."""

    def __init__(self, loader: StreamLoader, epoch: int, begin: Position) -> None:
        self._stream, self._epoch, self._begin = loader.stream, epoch, begin
        self._rank, self._ranks, self._size = loader.rank, loader.world_size, loader.batch_size
        self._drop_last = loader.options.drop_last

    def __iter__(self) -> Iterator[tuple[PackedBatch, Position]]:
        position = self._begin
        for step in self._steps():
            cuts = [len(step) * rank // self._ranks for rank in range(self._ranks + 1)]
            shares = [step[begin:end] for begin, end in pairwise(cuts)]
            position = self._behind(position, shares)
            yield self._collated(shares[self._rank]), position

    def _steps(self) -> Iterator[list[_Row]]:
        """The rows of each step over all ranks; what is left at the end is shared by all, at least a row each."""
        full = self._size * self._ranks
        held: deque[_Row] = deque()
        for row in self._rows():
            held.append(row)
            if len(held) >= full + self._ranks:
                yield [held.popleft() for _ in range(full)]
        if len(held) > full:  # behind a full step fewer rows than ranks would be left
            gives_up = not self._drop_last and self._size > 1
            yield [held.popleft() for _ in range(len(held) - self._ranks if gives_up else full)]
        if len(held) == full or (len(held) >= self._ranks and not self._drop_last):
            yield list(held)

    def _rows(self) -> Iterator[_Row]:
        begin = self._begin
        truncated = (begin.truncated_documents, begin.truncated_tokens)
        for store, window in self._windows():
            packing = window.packing
            is_begun = window.first_document == begin.first_document and begin.batches > 0
            if not is_begun or not begin.rows:
                truncated = (
                    truncated[0] + packing.truncated_documents,
                    truncated[1] + packing.truncated_tokens,
                )
            for number in range(begin.rows if is_begun else 0, packing.rows):
                yield _Row(
                    store=store,
                    packing=packing,
                    number=number,
                    first_document=window.first_document,
                    truncated=truncated,
                )

    def _windows(self) -> Iterator[tuple[TokenStore, StreamWindow]]:
        stream, first = self._stream, self._begin.first_document
        packer = StreamPacker(
            stream.context,
            long_documents=stream.long_documents,
            seed=stream.seed + self._epoch,
            first_document=first,
        )
        held: list[TokenStore] = []
        for store in stream.read(self._epoch, first):
            held.append(store)
            windows = packer.extend(store.lengths)
            if windows:
                held = [joined(held)]
            for window in windows:
                yield held[0], window
                held = [_without(held[0], window.documents)]
        held = [joined(held)]
        for window in packer.finish():
            yield held[0], window
            held = [_without(held[0], window.documents)]

    def _behind(self, position: Position, shares: list[list[_Row]]) -> Position:
        last = shares[-1][-1]
        rows = [row for share in shares for row in share]
        return Position(
            batches=position.batches + 1,
            first_document=last.first_document,
            rows=last.number + 1,
            before=position.before.plus(
                Progress(
                    documents=sum(row.documents for row in rows),
                    tokens=sum(row.tokens for row in rows),
                    room=sum(len(share) * self._length(share) for share in shares),
                )
            ),
            truncated_documents=last.truncated[0],
            truncated_tokens=last.truncated[1],
        )

    def _length(self, rows: list[_Row]) -> int:
        return rounded_length(max(row.tokens for row in rows), self._stream.context, self._stream.multiple_of)

    def _collated(self, rows: list[_Row]) -> PackedBatch:
        length, parts = self._length(rows), []
        for _, group in groupby(rows, key=lambda row: row.first_document):
            of_window = list(group)
            parts.append(
                collate(
                    of_window[0].store,
                    of_window[0].packing,
                    [row.number for row in of_window],
                    pad_id=self._stream.pad_id,
                    length=length,
                )
            )
        return parts[0] if len(parts) == 1 else PackedBatch.joined(parts, len(rows))


def _without(store: TokenStore, documents: int) -> TokenStore:
    """The store without its first documents."""
    begin = store.offsets[documents]
    learned = None if store.learned is None else store.learned[begin:]
    return TokenStore(tokens=store.tokens[begin:], offsets=store.offsets[documents:] - begin, learned=learned)


def _ahead(items: Iterable[_Item], number: int) -> Iterator[_Item]:
    """The items, so many of them drawn ahead by a thread; it ends when the iterator is let go."""
    waiting: queue.Queue[tuple[_Item | None, BaseException | None]] = queue.Queue(number)
    is_over = threading.Event()

    def put(item: _Item | None, error: BaseException | None) -> bool:
        while not is_over.is_set():
            with contextlib.suppress(queue.Full):
                waiting.put((item, error), timeout=0.1)
                return True
        return False

    def draw() -> None:
        error: BaseException | None = None
        try:
            for item in items:
                if not put(item, None):
                    return
        except BaseException as raised:  # noqa: BLE001 # it is raised where the items are used
            error = raised
        put(None, error or StopIteration())

    thread = threading.Thread(target=draw, name="memkit stream", daemon=True)
    thread.start()
    try:
        while True:
            item, error = waiting.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item  # pyright: ignore[reportReturnType]
    finally:
        is_over.set()
        thread.join()
