from itertools import count, islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_memkit.data.batching.collate import collate
from lightning_memkit.data.packing.pack import Packing, WorkLimit, pack
from lightning_memkit.data.packing.streaming import StreamPacker, StreamWindow, packed_windows

LENGTHS = st.lists(st.integers(0, 40), max_size=120)


def lognormal(number: int, context: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(4.5, 1, number).clip(1, context).astype(np.int64)


def windows_of(lengths, context: int, **options) -> list[StreamWindow]:
    packer = StreamPacker(context, **options)
    return [*packer.extend(lengths), *packer.finish()]


def rows_of(packing: Packing, first: int = 0) -> list[list[tuple[int, int, int]]]:
    """Each row's pieces: document in the stream, start, length."""
    pieces = zip(packing.documents.tolist(), packing.starts.tolist(), packing.lengths.tolist(), strict=True)
    pieces = [(first + document, start, length) for document, start, length in pieces]
    return [pieces[begin:end] for begin, end in zip(packing.offsets[:-1], packing.offsets[1:], strict=True)]


def rows_of_windows(windows: list[StreamWindow]) -> list[list[tuple[int, int, int]]]:
    return [row for window in windows for row in rows_of(window.packing, window.first_document)]


@settings(max_examples=100, deadline=None)
@given(
    lengths=LENGTHS,
    context=st.integers(1, 20),
    window_rows=st.integers(1, 6),
    work_limit=st.sampled_from([None, WorkLimit(most=60)]),
    long_documents=st.sampled_from(["split", "truncate"]),
)
def test_windows_hold_every_token_once_in_the_documents_order(
    lengths, context, window_rows, work_limit, long_documents
):
    windows = windows_of(
        lengths, context, window_rows=window_rows, work_limit=work_limit, long_documents=long_documents
    )
    longest = min(context, 7) if work_limit else context
    seen, expected_first = [], 0
    for window in windows:
        assert window.first_document == expected_first
        expected_first += window.documents
        assert window.packing.rows <= window_rows or window.documents == 1
        assert (window.packing.row_tokens <= context).all()
        assert not work_limit or (window.packing.row_work() <= work_limit.most).all()
        mine = [piece for row in rows_of(window.packing, window.first_document) for piece in row]
        assert all(window.first_document <= document < expected_first for document, _, _ in mine)
        seen += [(document, start + n) for document, start, length in mine for n in range(length)]
    kept = lengths if long_documents == "split" else [min(length, longest) for length in lengths]
    assert sorted(seen) == [(document, n) for document, length in enumerate(kept) for n in range(length)]
    assert expected_first == len(lengths)
    counted = "split_documents" if long_documents == "split" else "truncated_documents"
    too_long = sum(length > longest for length in lengths)
    assert sum(getattr(window.packing, counted) for window in windows) == too_long


@settings(max_examples=60, deadline=None)
@given(
    lengths=LENGTHS,
    cuts=st.lists(st.integers(0, 120), max_size=5),
    long_documents=st.sampled_from(["split", "truncate"]),
)
def test_how_the_lengths_come_changes_nothing(lengths, cuts, long_documents):
    options = {"window_rows": 3, "long_documents": long_documents}
    at_once = windows_of(lengths, 16, **options)
    one_by_one, in_parts = StreamPacker(16, **options), StreamPacker(16, **options)
    singly = [window for length in lengths for window in one_by_one.add(length)]
    parts = np.split(np.array(lengths, np.int64), sorted(min(cut, len(lengths)) for cut in cuts))
    parted = [window for part in parts for window in in_parts.extend(part)]
    for windows, packer in ((singly, one_by_one), (parted, in_parts)):
        assert rows_of_windows([*windows, *packer.finish()]) == rows_of_windows(at_once)
        assert (packer.first_document, packer.held_documents) == (len(lengths), 0)


def test_known_lengths_pack_to_the_same_rows():
    lengths = np.concatenate((lognormal(3000, 64), [0, 200, 0, 65], lognormal(3000, 64, seed=1)))
    windows = windows_of(lengths, 64, long_documents="split")
    packed = pack(lengths, 64, packing="stream", long_documents="split")
    assert len(windows) > 5
    assert rows_of(packed) == rows_of_windows(windows)
    assert (packed.split_documents, packed.empty_documents) == (2, 2)
    assert pack([], 64, packing="stream").rows == 0
    assert pack([0, 0], 64, packing="stream", seed=0).empty_documents == 2


@pytest.mark.parametrize("context", [512, 2048])
def test_windows_are_nearly_as_full_as_all_documents_together(context):
    lengths = lognormal(60_000, context)
    windows = windows_of(lengths, context)
    assert len(windows) > 5
    assert {window.packing.rows for window in windows[:-1]} == {512}
    tokens = sum(window.packing.tokens for window in windows[:-1])
    assert tokens / (512 * context * (len(windows) - 1)) > 0.998


@pytest.mark.parametrize("length", [33, 23, 64])
def test_lengths_that_admit_no_full_row_still_give_full_windows(length):
    windows = windows_of([length] * 1000, 64, window_rows=10)
    assert {window.packing.rows for window in windows[:-1]} == {10}
    assert sum(window.packing.rows for window in windows) == pack([length] * 1000, 64).rows


def test_only_what_is_kept_of_a_long_document_counts():
    windows = windows_of([200] * 25, 64, window_rows=10, long_documents="truncate")
    assert [window.packing.rows for window in windows] == [10, 10, 5]
    packer = StreamPacker(64, window_rows=10, long_documents="truncate")
    assert [len(packer.add(200)) for _ in range(25)] == [*[0] * 10, 1, *[0] * 9, 1, *[0] * 4]


def test_long_documents_do_not_come_first():
    windows = windows_of(lognormal(40_000, 512), 512)[:-1]
    pieces = np.array([np.diff(window.packing.offsets) for window in windows])
    first, second = pieces[:, :256].mean(), pieces[:, 256:].mean()
    assert abs(first - second) < 0.06 * pieces.mean()
    other_seed = windows_of(lognormal(40_000, 512), 512, seed=1)[0].packing
    assert (
        other_seed.documents.tolist() != windows_of(lognormal(40_000, 512), 512)[0].packing.documents.tolist()
    )
    in_order_of_creation = np.diff(pack(lognormal(2000, 512), 512).offsets)
    assert in_order_of_creation[:100].mean() < 0.6 * in_order_of_creation[-100:].mean()


def test_a_stream_goes_on_at_any_row_from_two_numbers():
    lengths = lognormal(4000, 256).tolist()
    whole = rows_of_windows(windows_of(lengths, 256, window_rows=64))
    for done in np.random.default_rng(0).integers(0, len(whole), 20).tolist():
        packer, given = StreamPacker(256, window_rows=64), 0
        for length in lengths:
            windows = packer.add(length)
            given += sum(window.packing.rows for window in windows)
            if given > done:
                break
        else:
            windows = packer.finish()
            given += windows[-1].packing.rows
        state = {
            "first_document": windows[-1].first_document,
            "rows_done": done - given + windows[-1].packing.rows,
        }
        resumed = StreamPacker(256, window_rows=64, first_document=state["first_document"])
        rest = [*resumed.extend(lengths[state["first_document"] :]), *resumed.finish()]
        assert rows_of_windows(rest)[state["rows_done"] :] == whole[done:]


def test_an_endless_stream_holds_one_window_of_documents():
    drawn = 0

    def documents():
        nonlocal drawn
        for number in count():
            drawn += 1
            yield np.full(1 + number % 50, number)

    packer = StreamPacker(64, window_rows=8)
    for store, window in islice(packed_windows(documents(), packer), 20):
        assert store.tokens.size <= 8 * 64
        assert drawn - packer.first_document <= 50
        for row in range(window.packing.rows):
            batch = collate(store, window.packing, [row])
            documents_of_row = rows_of(window.packing, window.first_document)[row]
            expected = [document for document, _, length in documents_of_row for _ in range(length)]
            assert batch["input_ids"][0].tolist() == expected


def test_windows_of_tokens_hold_every_document():
    documents = [[number] * length for number, length in enumerate([3, 0, 9, 1, 5, 5, 2])]
    packer = StreamPacker(5, window_rows=2, long_documents="split")
    tokens = [
        token
        for store, window in packed_windows(documents, packer)
        for document, start, length in zip(
            window.packing.documents, window.packing.starts, window.packing.lengths, strict=True
        )
        for token in store[document][start : start + length].tolist()
    ]
    assert sorted(tokens) == sorted(token for document in documents for token in document)


def test_a_refused_document_leaves_the_stream_as_it_was():
    packer = StreamPacker(8)
    packer.add(5)
    with pytest.raises(ValueError, match="1 of 1 documents are longer than context=8"):
        packer.add(9)
    with pytest.raises(ValueError, match="1 of 2 documents are longer than context=8"):
        packer.extend([2, 9])
    with pytest.raises(ValueError, match="lengths holds -1"):
        packer.add(-1)
    assert packer.held_documents == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(context=0), "context=0 is below 1"),
        (dict(context=8, window_rows=0), "window_rows=0 is below 1"),
        (dict(context=8, seed=-1), "seed=-1 is below 0"),
        (dict(context=8, first_document=-1), "first_document=-1 is below 0"),
        (dict(context=8, long_documents="drop"), "long_documents='drop' is unknown"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        StreamPacker(**options)
