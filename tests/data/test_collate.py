import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_memkit.data.batching.collate import collate, full_batch
from lightning_memkit.data.packing.pack import pack
from lightning_memkit.data.sources.token_records import token_store


def plainly(store, packing, rows, pad_id):
    """The same batch, token by token."""
    length = max(int(packing.row_tokens[row]) for row in rows)
    ids, labels, positions, ends = [], [], [], [0]
    for row in rows:
        row_ids, row_labels, row_positions = [], [], []
        for piece in range(packing.offsets[row], packing.offsets[row + 1]):
            start, size = int(packing.starts[piece]), int(packing.lengths[piece])
            tokens = store[packing.documents[piece]][start : start + size].tolist()
            row_ids += tokens
            row_labels += [-100, *tokens[1:]]
            row_positions += range(size)
            ends.append(ends[-1] + size)
        padding = length - len(row_ids)
        if padding:
            ends.append(ends[-1] + padding)
        ids.append(row_ids + [pad_id] * padding)
        labels.append(row_labels + [-100] * padding)
        positions.append(row_positions + list(range(1, padding + 1)))
    return ids, labels, positions, ends


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=30),
    context=st.integers(1, 16),
    packing=st.sampled_from(["bfd", "none"]),
    seed=st.integers(0, 5),
)
def test_a_batch_is_what_a_plain_loop_builds(lengths, context, packing, seed):
    tokens = np.arange(sum(lengths))
    store = token_store(np.split(tokens, np.cumsum(lengths)[:-1]))
    packed = pack(store.lengths, context, packing=packing, long_documents="split")
    rows = np.random.default_rng(seed).permutation(packed.rows)[:4]
    batch = collate(store, packed, rows, pad_id=7)
    ids, labels, positions, ends = plainly(store, packed, rows, 7)
    assert batch["input_ids"].tolist() == ids
    assert batch["labels"].tolist() == labels
    assert batch["position_ids"].tolist() == positions
    assert batch["cu_seqlens"].tolist() == ends
    assert batch["max_seqlen"] == max(np.diff(ends))


def test_types_are_those_that_models_and_kernels_take():
    batch = full_batch(2, 8, vocabulary=11)
    assert {key: value.dtype for key, value in batch.items() if key != "max_seqlen"} == {
        "input_ids": torch.int64,
        "labels": torch.int64,
        "position_ids": torch.int64,
        "cu_seqlens": torch.int32,
    }
    assert isinstance(batch["max_seqlen"], int)


@pytest.mark.parametrize(("multiple_of", "length"), [(1, 9), (4, 12), (8, 16), (64, 20)])
def test_the_length_is_rounded_up_within_the_context(multiple_of, length):
    store = token_store([[5] * 9, [6] * 3])
    batch = collate(store, pack(store.lengths, 20, packing="none"), [0, 1], multiple_of=multiple_of)
    assert batch.length == length
    assert batch.real_tokens == 12


def test_a_split_document_goes_on_as_another():
    store = token_store([[1, 2, 3, 4, 5]])
    batch = collate(store, pack(store.lengths, 3, long_documents="split"), [0, 1])
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 5, 0]]
    assert batch["labels"].tolist() == [[-100, 2, 3], [-100, 5, -100]]


def test_no_rows_is_refused():
    store = token_store([[1]])
    with pytest.raises(ValueError, match="rows is empty"):
        collate(store, pack(store.lengths, 3), [])


def test_a_full_batch_is_one_document_a_row():
    batch = full_batch(3, 5, vocabulary=4)
    assert batch["cu_seqlens"].tolist() == [0, 5, 10, 15]
    assert batch.weight() == 12
    assert 0 <= batch["input_ids"].min() <= batch["input_ids"].max() < 4
