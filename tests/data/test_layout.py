import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_memkit.data.packing.layout import joined
from lightning_memkit.data.packing.pack import Packing, WorkLimit, pack


def pieces_of(packing: Packing) -> list[tuple[int, int, int]]:
    return list(
        zip(packing.documents.tolist(), packing.starts.tolist(), packing.lengths.tolist(), strict=True)
    )


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=60), by=st.integers(1, 9))
def test_rows_become_divisible_and_keep_their_pieces(lengths, by):
    packed = pack(lengths, 30)
    wanted = -(-packed.rows // by) * by
    if wanted > packed.pieces:
        with pytest.raises(ValueError, match=f"can't stand in {wanted} rows"):
            packed.divisible(by)
        return
    divided = packed.divisible(by)
    assert divided.rows == wanted
    assert pieces_of(divided) == pieces_of(packed)
    assert set(packed.offsets.tolist()) <= set(divided.offsets.tolist())
    assert (np.diff(divided.offsets) > 0).all()


def test_a_row_is_cut_where_its_halves_hold_equally_many_tokens():
    packed = pack([20, 2, 2, 2, 2, 2], 30)
    assert packed.divisible(2).row_tokens.tolist() == [20, 10]
    assert pack([4] * 6, 24).divisible(4).row_tokens.tolist() == [4, 8, 4, 8]
    with pytest.raises(ValueError, match="by=0 is below 1"):
        packed.divisible(0)


def test_joined_rows_stand_one_behind_the_other():
    one, two = pack([5, 3, 9], 8, long_documents="split"), pack([0, 4, 4, 4], 8)
    both = joined([one, two])
    assert both.row_tokens.tolist() == [*one.row_tokens, *two.row_tokens]
    assert pieces_of(both) == [*pieces_of(one), *pieces_of(two)]
    assert (both.split_documents, both.empty_documents) == (1, 1)
    with pytest.raises(ValueError, match="different context"):
        joined([one, pack([1], 9)])
    with pytest.raises(ValueError, match="or none"):
        joined([])


def test_rows_are_taken_in_the_order_asked_for():
    packed = pack([7, 6, 5, 3, 2, 1], 8)
    taken = packed.in_order(np.array([2, 0]))
    rows = np.split(packed.documents, packed.offsets[1:-1])
    assert taken.documents.tolist() == [*rows[2], *rows[0]]
    assert taken.row_tokens.tolist() == packed.row_tokens[[2, 0]].tolist()


def test_a_rows_work_is_the_sum_over_its_documents():
    packed = pack([6, 4, 3], 10)
    assert packed.row_work().tolist() == [36 + 16, 9]
    assert packed.row_work(linear=10).tolist() == [36 + 16 + 100, 9 + 30]


def test_work_does_not_overflow_32_bits():
    length = 200_000
    assert pack([length], length).row_work().tolist() == [length**2]
    limit = WorkLimit(most=length**2)
    assert pack([length, 5], length, work_limit=limit).row_tokens.tolist() == [length, 5]
