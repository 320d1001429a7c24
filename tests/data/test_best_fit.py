import inspect
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_memkit.data.packing import best_fit
from lightning_memkit.data.packing.pack import Packing, WorkLimit, pack


def rows_of(packing: Packing) -> list[list[int]]:
    """The lengths in each row."""
    return [row.tolist() for row in np.split(packing.lengths, packing.offsets[1:-1])] if packing.rows else []


def longest_that_fits(row: list[int], context: int, work_limit: WorkLimit | None) -> int:
    """Counted up one token at a time."""
    tokens = context - sum(row)
    if work_limit is None:
        return tokens
    work = work_limit.most - sum(n * (n + work_limit.linear) for n in row)
    return max(n for n in range(tokens + 1) if n * (n + work_limit.linear) <= work)


def naive(lengths: list[int], context: int, work_limit: WorkLimit | None) -> list[list[int]]:
    """Document by document into the row with the least space that is enough; of several, the oldest.

    A row keeps its age while it isn't touched, and is asked first while documents of one length fill it.
    """
    rows: list[list[int]] = []
    touched: list[int] = []
    for now, length in enumerate(sorted(lengths, reverse=True)):
        spaces = [longest_that_fits(row, context, work_limit) for row in rows]
        fitting = [number for number, space in enumerate(spaces) if space >= length]
        if not fitting:
            rows.append([])
            touched.append(now)
            chosen = len(rows) - 1
        else:
            least = min(spaces[number] for number in fitting)
            chosen = min(
                (number for number in fitting if spaces[number] == least),
                key=lambda number: (
                    not (touched[number] == now - 1 and rows[number][-1] == length),
                    touched[number],
                ),
            )
        rows[chosen].append(length)
        touched[chosen] = now
    return rows


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 24), max_size=80),
    context=st.sampled_from([24, 31, 60]),
    work_limit=st.sampled_from(
        [None, None, WorkLimit(most=576), WorkLimit(most=601), WorkLimit(most=1000, linear=10)]
    ),
)
def test_the_rows_are_those_of_a_search_document_by_document(lengths, context, work_limit):
    packed = pack(lengths, context, work_limit=work_limit)
    assert rows_of(packed) == naive(lengths, context, work_limit)
    assert sorted(packed.documents.tolist()) == list(range(len(lengths)))
    assert packed.lengths.tolist() == [lengths[document] for document in packed.documents]


def test_the_rows_are_those_of_a_search_under_random_limits():
    for seed in range(120):
        rng = np.random.default_rng(seed)
        context = int(rng.integers(20, 60))
        limit = WorkLimit(most=int(rng.integers(30, 400)), linear=int(rng.integers(0, 6)))
        longest = longest_that_fits([], context, limit)
        lengths = rng.integers(1, longest + 1, int(rng.integers(20, 120))).tolist()
        assert rows_of(pack(lengths, context, work_limit=limit)) == naive(lengths, context, limit), seed


def test_a_work_limit_that_never_binds_changes_nothing():
    lengths = np.random.default_rng(0).integers(1, 100, 2000)
    plain, limited = pack(lengths, 128), pack(lengths, 128, work_limit=WorkLimit(most=128 * 128))
    assert plain.documents.tolist() == limited.documents.tolist()
    assert plain.offsets.tolist() == limited.offsets.tolist()


@pytest.mark.parametrize("linear", [0, 3000])
def test_rows_under_a_work_limit_take_more_equal_work(linear):
    lengths = np.random.default_rng(0).lognormal(5, 1, 20_000).clip(1, 1024).astype(int)
    limit = WorkLimit(most=1024 * (1024 + linear), linear=linear)
    plain = pack(lengths, 1024).row_work(linear)
    # Room for more short documents; the work of a document of 1024 tokens at the most.
    packed = pack(lengths, 20_000, work_limit=limit)
    limited = packed.row_work(linear)
    assert limited.max() <= limit.most
    assert plain.mean() / plain.max() < limited.mean() / limited.max()
    assert limited.mean() / limited.max() > 0.97
    assert packed.rows <= 1.03 * packed.lower_bound_rows


def test_bound_is_of_whichever_limit_is_narrower():
    work_bound = pack([10] * 30, 1000, work_limit=WorkLimit(most=300))
    assert (work_bound.rows, work_bound.lower_bound_rows) == (10, 10)
    token_bound = pack([10] * 30, 100, work_limit=WorkLimit(most=100_000))
    assert (token_bound.rows, token_bound.lower_bound_rows) == (3, 3)


@pytest.mark.parametrize("pieces_a_run", [0, 10**9])
def test_both_ways_to_order_the_pieces_agree(monkeypatch, pieces_a_run):
    lengths = np.random.default_rng(0).integers(1, 100, 3000)
    expected = pack(lengths, 100)
    monkeypatch.setattr(best_fit, "_PIECES_A_RUN", pieces_a_run)
    packed = pack(lengths, 100)
    assert packed.documents.tolist() == expected.documents.tolist()
    assert packed.offsets.tolist() == expected.offsets.tolist()
    assert packed.lengths.tolist() == lengths[packed.documents].tolist()


def test_the_python_work_does_not_grow_with_the_documents():
    """A loop over documents would take 100 times the lines for 100 times the documents."""

    def lines(count: int) -> int:
        lengths = np.random.default_rng(0).integers(1, 128, count)
        executed = 0
        source = inspect.getsourcefile(best_fit)

        def trace(frame, event, _):
            nonlocal executed
            executed += event == "line" and frame.f_code.co_filename == source
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            pack(lengths, 128)
        finally:
            sys.settrace(before)
        return executed

    assert lines(100_000) < 3 * lines(1_000)
