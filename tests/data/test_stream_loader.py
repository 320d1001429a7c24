import gc
import threading
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_memkit.data.batching.stream_batches import Stream
from lightning_memkit.data.loading.loader import LoaderOptions
from lightning_memkit.data.loading.stream_loader import StreamLoader
from lightning_memkit.data.sources.shares import DocumentOptions
from lightning_memkit.data.sources.stream_source import StreamDocuments, check_stream, is_stream

CONTEXT = 8


def documents(count: int) -> list[list[int]]:
    """Documents in which every token is another."""
    ends = np.cumsum(np.random.default_rng(1).integers(1, CONTEXT + 1, count))
    return [list(range(begin + 1, end + 1)) for begin, end in zip([0, *ends], ends, strict=False)]


def loader_of(
    count: int, *, rank: int = 0, world_size: int = 1, share: str | None = None, **options
) -> StreamLoader:
    source = documents(count)
    read = StreamDocuments(
        source=lambda: iter(source), tokenizer=None, options=DocumentOptions(validation=0.3), share=share
    )
    stream = Stream(read=read, context=CONTEXT, seed=3)
    return StreamLoader(
        stream, LoaderOptions(**{"batch_size": 4, **options}), rank=rank, world_size=world_size
    )


def tokens(batch) -> list[int]:
    return batch["input_ids"][batch["input_ids"] > 0].tolist()


def epoch(loader) -> list[list[int]]:
    return [tokens(batch) for batch in loader]


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(20, 3000),
    batch_size=st.integers(1, 5),
    world_size=st.sampled_from([1, 2, 4]),
    interrupted=st.integers(0, 400),
    ahead=st.booleans(),
)
def test_every_token_once_over_all_ranks_and_a_resume(count, batch_size, world_size, interrupted, ahead):
    seen, batches, states = [], set(), []
    for rank in range(world_size):
        options = {
            "batch_size": batch_size,
            "rank": rank,
            "world_size": world_size,
            "num_workers": int(ahead),
        }
        first, second = loader_of(count, **options), loader_of(count, **options)
        parts = [tokens(batch) for batch in islice(first, interrupted)]
        states.append(first.state_dict())
        second.load_state_dict(states[-1])
        if not first.position.is_end:
            parts += epoch(second)
        assert parts == epoch(loader_of(count, **options))
        assert all(parts)
        batches.add(len(parts))
        seen += [token for part in parts for token in part]
    assert len(batches) == 1
    assert all(state == states[0] for state in states)
    total = sum(map(len, documents(count)))
    assert len(seen) == len(set(seen))
    assert total - len(seen) <= (world_size - 1) * CONTEXT * (batch_size == 1)


def test_epochs_hold_the_same_documents_in_other_rows():
    loader = loader_of(500)
    first, second = epoch(loader), epoch(loader)
    assert first != second
    assert sorted(sum(first, [])) == sorted(sum(second, []))
    assert loader.progress.tokens == 2 * sum(map(len, documents(500)))
    assert loader.progress.documents == 1000


def test_shares_of_a_stream_are_disjoint_and_complete():
    train, validation = epoch(loader_of(400, share="train")), epoch(loader_of(400, share="validation"))
    flat = sum(train, []) + sum(validation, [])
    assert sorted(flat) == list(range(1, len(flat) + 1))
    assert 0.2 < len(sum(validation, [])) / len(flat) < 0.4


def test_a_trainer_that_draws_one_ahead_saves_what_it_has_used():
    loader, plain = loader_of(200), loader_of(200)
    iterator, behind = iter(loader), iter(plain)
    next(iterator)
    for _ in range(5):
        next(iterator)  # the batch after the one that is used now
        loader.take()
        next(behind)
        assert loader.state_dict() == plain.state_dict()


def test_what_is_before_the_position_is_not_tokenised_again(monkeypatch):
    plain = loader_of(8000)
    first = iter(plain)
    while plain.position.first_document == 0:
        next(first)
    resumed, read = loader_of(8000), []
    documents_of = resumed.stream.read._store  # pyright: ignore[reportFunctionMemberAccess]
    object.__setattr__(
        resumed.stream.read,
        "_store",
        lambda chunk, number: read.append(number) or documents_of(chunk, number),
    )
    resumed.load_state_dict(plain.state_dict())
    next(iter(resumed))
    assert min(read) == plain.position.first_document > 500


def test_truncation_is_counted_once():
    stream = Stream(
        read=StreamDocuments(
            source=[list(range(1, 15))] * 300 + [[1]], tokenizer=None, options=DocumentOptions()
        ),
        context=CONTEXT,
        long_documents="truncate",
    )
    loader = StreamLoader(stream, LoaderOptions(batch_size=7))
    iterator = iter(loader)
    next(iterator)
    resumed = StreamLoader(stream, LoaderOptions(batch_size=7))
    resumed.load_state_dict(loader.state_dict())
    epoch(resumed)
    assert (resumed.position.truncated_documents, resumed.position.truncated_tokens) == (300, 300 * 6)


def test_a_thread_that_is_let_go_ends():
    iterator = iter(loader_of(3000, num_workers=1))
    next(iterator)
    assert any(thread.name == "memkit stream" for thread in threading.enumerate())
    del iterator
    gc.collect()
    assert not any(thread.name == "memkit stream" for thread in threading.enumerate())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_the_stream_reaches_the_user(num_workers):
    def broken():
        yield [1, 2]
        raise RuntimeError("the connection was lost")

    stream = Stream(
        read=StreamDocuments(source=broken, tokenizer=None, options=DocumentOptions()), context=CONTEXT
    )
    with pytest.raises(RuntimeError, match="the connection was lost"):
        list(StreamLoader(stream, LoaderOptions(batch_size=1, num_workers=num_workers)))


def test_a_budget_of_tokens_limits_the_rows():
    loader = loader_of(300, batch_size=None, batch_tokens=3 * CONTEXT + 1)
    assert {batch.rows for batch in list(loader)[:-2]} == {3}
    with pytest.raises(ValueError, match="batch_tokens=7 is less than context=8"):
        loader_of(300, batch_size=None, batch_tokens=7)
    with pytest.raises(ValueError, match="padding='bucket' sorts rows"):
        loader_of(300, padding="bucket")


def test_a_stream_that_gives_no_batch_says_why():
    stream = Stream(
        read=StreamDocuments(source=lambda: iter([[1, 2, 3]]), tokenizer=None, options=DocumentOptions()),
        context=CONTEXT,
    )
    for options, ranks in (
        (LoaderOptions(batch_size=1), 2),
        (LoaderOptions(batch_size=2, drop_last=True), 1),
    ):
        loader = StreamLoader(stream, options, rank=0, world_size=ranks)
        with pytest.raises(ValueError, match=r"The stream's 1 rows are too few for batch_size="):
            list(loader)
    assert len(list(StreamLoader(stream, LoaderOptions(batch_size=2)))) == 1


@pytest.mark.parametrize(("rows", "steps"), [(2, 1), (3, 1), (4, 2)])
def test_a_stream_of_few_steps_gives_them(rows, steps):
    stream = Stream(
        read=StreamDocuments(
            source=lambda: iter([[1] * CONTEXT] * rows), tokenizer=None, options=DocumentOptions()
        ),
        context=CONTEXT,
    )
    loader = StreamLoader(stream, LoaderOptions(batch_size=2, drop_last=True))
    assert [batch.rows for batch in loader] == [2] * steps


def test_a_state_of_another_stream_is_refused():
    with pytest.raises(ValueError, match="rows_per_step: 4 then, 8 now"):
        loader_of(30, batch_size=8).load_state_dict(loader_of(30).state_dict())


def test_what_can_be_read_only_once_is_refused():
    assert is_stream(iter([]))
    assert is_stream(lambda: iter([]))
    assert not is_stream([])
    assert not is_stream("a.txt")
    with pytest.raises(ValueError, match="can be read only once.*source=documents instead of"):
        check_stream(iter([]))
