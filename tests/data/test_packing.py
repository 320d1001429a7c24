from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_memkit.data.packing.pack import Packing, WorkLimit, pack


def contents(packing: Packing) -> Counter:
    """How often each multiset of lengths stands in a row."""
    rows = np.split(packing.lengths, packing.offsets[1:-1])
    return Counter(tuple(sorted(row.tolist())) for row in rows) if packing.rows else Counter()


def trl_contents(lengths: list[int], context: int) -> Counter:
    """The same of TRL's packer, document by document with a segment tree; long documents split."""
    pyarrow = pytest.importorskip("pyarrow")
    trl = pytest.importorskip("trl.data_utils")
    table = pyarrow.table({"x": pyarrow.array([[0] * n for n in lengths], pyarrow.list_(pyarrow.int8()))})
    packed = trl._pack_bfd(table, context, "split")
    return Counter(tuple(sorted(row.as_py())) for row in packed["seq_lengths"])


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=300), context=st.sampled_from([7, 16, 31, 60])
)
def test_the_rows_are_those_of_trls_packer(lengths, context):
    assert contents(pack(lengths, context, long_documents="split")) == trl_contents(lengths, context)


@pytest.mark.parametrize("context", [256, 1000])
def test_the_rows_are_those_of_trls_packer_on_many_documents(context):
    lengths = np.random.default_rng(0).lognormal(4, 1, 20_000).clip(1, context).astype(int)
    assert contents(pack(lengths, context)) == trl_contents(lengths.tolist(), context)


def tokens_of(packing: Packing) -> list[tuple[int, int]]:
    pieces = zip(packing.documents.tolist(), packing.starts.tolist(), packing.lengths.tolist(), strict=True)
    return [(document, start + n) for document, start, length in pieces for n in range(length)]


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=60),
    context=st.integers(1, 20),
    packing=st.sampled_from(["bfd", "stream", "none"]),
    work_limit=st.sampled_from([None, WorkLimit(most=60), WorkLimit(most=200, linear=5)]),
    seed=st.sampled_from([None, 3]),
)
def test_every_token_stands_in_one_row_and_no_row_overflows(lengths, context, packing, work_limit, seed):
    packed = pack(lengths, context, packing=packing, long_documents="split", work_limit=work_limit, seed=seed)
    expected = [(document, n) for document, length in enumerate(lengths) for n in range(length)]
    assert sorted(tokens_of(packed)) == expected
    assert (packed.row_tokens <= context).all()
    longest = context
    if work_limit:
        assert all(
            sum(n * (n + work_limit.linear) for n in row) <= work_limit.most for row in contents(packed)
        )
        longest = max(n for n in range(context + 1) if n * (n + work_limit.linear) <= work_limit.most)
    assert (np.diff(packed.offsets) > 0).all()
    assert packed.tokens == sum(lengths) == packed.row_tokens.sum()
    assert packed.empty_documents == lengths.count(0)
    assert packed.split_documents == sum(length > longest for length in lengths)
    assert packed.rows >= packed.lower_bound_rows


def test_one_document_a_row_where_nothing_is_packed():
    packed = pack([3, 1, 5], 5, packing="none")
    assert packed.offsets.tolist() == [0, 1, 2, 3]
    assert packed.documents.tolist() == [0, 1, 2]


def test_a_long_document_is_refused_with_value_rule_and_remedy():
    with pytest.raises(
        ValueError, match="2 of 3 documents are longer than context=4 .* 9 tokens.*must fit.*split"
    ):
        pack([9, 2, 5], 4)


def test_what_truncation_drops_is_counted():
    packed = pack([9, 2, 5], 4, long_documents="truncate")
    assert (packed.truncated_documents, packed.truncated_tokens, packed.split_documents) == (2, 6, 0)
    assert sorted(packed.lengths.tolist()) == [2, 4, 4]
    assert packed.starts.max() == 0


def test_a_seed_shuffles_the_rows_and_nothing_else():
    lengths = np.random.default_rng(0).integers(1, 50, 500)
    plain, one, two, again = (pack(lengths, 64, seed=seed) for seed in (None, 1, 2, 1))
    assert contents(plain) == contents(one) == contents(two)
    assert one.documents.tolist() != two.documents.tolist()
    assert one.documents.tolist() == again.documents.tolist()
    # Long documents come first in the order of creation, and not after shuffling.
    pieces = np.diff(plain.offsets)
    shuffled = np.diff(one.offsets)
    half = plain.rows // 2
    assert pieces[:half].mean() < 0.9 * pieces[half:].mean()
    assert abs(shuffled[:half].mean() - shuffled[half:].mean()) < 0.5 * np.ptp(pieces)


def test_efficiency_and_bound_on_lengths_that_admit_no_full_row():
    packed = pack([34] * 300, 100)  # two of them fit
    assert packed.rows == 150
    assert packed.efficiency == pytest.approx(0.68)
    assert packed.lower_bound_rows == 102
    assert packed.over_bound == pytest.approx(150 / 102 - 1)


def test_a_context_beyond_sixteen_bits_packs_as_its_hundredth():
    lengths = np.random.default_rng(0).integers(1, 2000, 3000)
    small, large = pack(lengths, 2000), pack(lengths * 100, 200_000)
    assert large.documents.tolist() == small.documents.tolist()
    assert large.offsets.tolist() == small.offsets.tolist()


def test_nothing_packs_to_nothing():
    packed = pack([], 8)
    assert (packed.rows, packed.tokens, packed.efficiency, packed.over_bound) == (0, 0, 1.0, 0.0)
    assert pack([0, 0], 8, seed=1).empty_documents == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(lengths=[1], context=0), "context=0 is below 1"),
        (dict(lengths=[1], context=4, packing="ffd"), "packing='ffd' is unknown"),
        (dict(lengths=[1], context=4, long_documents="drop"), "long_documents='drop' is unknown"),
        (dict(lengths=[-1], context=4), "lengths holds -1"),
        (dict(lengths=[1.5], context=4), "lengths is float64"),
        (dict(lengths=[[1]], context=4), r"shape \(1, 1\)"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        pack(**arguments)
