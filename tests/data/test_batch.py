import io
import pickle

import pytest
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.utilities.data import _extract_batch_size
from lightning_utilities.core.apply_func import apply_to_collection

from lightning_memkit.data.batching.batch import PackedBatch
from lightning_memkit.data.batching.collate import collate
from lightning_memkit.data.packing.pack import pack
from lightning_memkit.data.sources.token_records import token_store


@pytest.fixture
def batch() -> PackedBatch:
    """Rows of 4 + 1, 3 + 2, 4 and 1 tokens: the last two are padded, one of them by a single token."""
    store = token_store([[1, 2, 3, 4], [5], [6, 7, 8], [9, 10], [11, 12, 13, 14], [15]])
    packed = pack(store.lengths[:4], 5)
    first = collate(store, packed, [0, 1])
    alone = collate(store, pack(store.lengths, 5, packing="none"), [4, 5], multiple_of=5)
    return PackedBatch(
        {
            **{key: torch.cat((first[key], alone[key])) for key in ("input_ids", "labels", "position_ids")},
            "cu_seqlens": torch.cat((first["cu_seqlens"], alone["cu_seqlens"][1:] + 10)),
            "max_seqlen": 4,
        }
    )


def test_it_counts_its_documents_tokens_and_labels(batch):
    assert (batch.rows, batch.length) == (4, 5)
    assert batch.documents == 6
    assert batch.real_tokens == 15
    assert batch.efficiency == 15 / 20
    assert batch.weight() == 15 - 6


def test_its_bounds_cover_everything_and_end_with_every_row(batch):
    bounds = batch["cu_seqlens"].tolist()
    assert bounds[0] == 0
    assert bounds[-1] == batch["input_ids"].numel()
    assert bounds == sorted(set(bounds))
    assert {5, 10, 15, 20} <= set(bounds)


@pytest.mark.parametrize("sizes", [[4], [1, 3], [3, 1], [1, 1, 1, 1], [2, 2]])
def test_its_parts_are_batches_of_their_own(batch, sizes):
    parts = batch.split(sizes)
    assert [part.rows for part in parts] == sizes
    for name in ("documents", "real_tokens"):
        assert sum(getattr(part, name) for part in parts) == getattr(batch, name)
    assert sum(part.weight() for part in parts) == batch.weight()
    assert torch.equal(torch.cat([part["input_ids"] for part in parts]), batch["input_ids"])
    for part in parts:
        bounds = part["cu_seqlens"]
        assert bounds[0] == 0
        assert bounds[-1] == part["input_ids"].numel()
        assert part["max_seqlen"] == bounds.diff().max()
        assert bounds.dtype == torch.int32


def test_parts_share_the_memory_of_the_whole(batch):
    part = batch.split([1, 3])[1]
    assert part["input_ids"].untyped_storage().data_ptr() == batch["input_ids"].untyped_storage().data_ptr()


@pytest.mark.parametrize("sizes", [[3], [5], [0, 4], [2, 3], []])
def test_sizes_that_do_not_fit_are_refused(batch, sizes):
    with pytest.raises(ValueError, match="don't divide 4 rows"):
        batch.split(sizes)


def test_lightning_moves_it_whole_and_reads_its_rows(batch):
    moved = move_data_to_device(batch, torch.device("meta"))
    assert isinstance(moved, PackedBatch)
    assert {value.device.type for value in moved.values() if isinstance(value, torch.Tensor)} == {"meta"}
    assert next(iter(_extract_batch_size(batch))) == 4


def test_lightnings_precision_plugins_keep_its_type(batch):
    mapped = apply_to_collection(batch, function=lambda tensor: tensor.clone(), dtype=torch.Tensor)
    assert isinstance(mapped, PackedBatch)
    assert mapped.documents == batch.documents


def test_it_survives_pickling(batch):
    again = pickle.loads(pickle.dumps(batch))
    assert isinstance(again, PackedBatch)
    assert again.documents == batch.documents


def test_pinning_asks_every_tensor(batch, monkeypatch):
    asked = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: asked.append(tensor.shape) or tensor)
    pinned = batch.pin_memory()
    assert isinstance(pinned, PackedBatch)
    assert len(asked) == 4


def test_rows_cross_to_another_process_as_one_tensor():
    store = token_store([[1, 2, 3], [4, 5], [6]])
    batch = collate(store, pack(store.lengths, 5), [0, 1])
    tensors = []

    class Counts(pickle.Pickler):
        def persistent_id(self, obj):
            if isinstance(obj, torch.Tensor):
                tensors.append(obj)
            return

    written = io.BytesIO()
    Counts(written).dump(batch)
    assert [tuple(tensor.shape) for tensor in tensors] == [(3, 2, 5)]
    again = pickle.loads(written.getvalue())
    assert list(again) == list(batch)
    assert all(torch.equal(torch.as_tensor(again[key]), torch.as_tensor(batch[key])) for key in batch)
    assert again["cu_seqlens"].dtype == torch.int32


def test_a_batch_of_other_tensors_crosses_as_it_is():
    store = token_store([[1, 2, 3], [4, 5], [6]])
    batch = collate(store, pack(store.lengths, 5), [0, 1])
    for other in (batch.split([1, 1])[1], PackedBatch({**batch, "labels": batch["labels"].clone()})):
        again = pickle.loads(pickle.dumps(other))
        assert type(again) is PackedBatch
        assert all(torch.equal(torch.as_tensor(again[key]), torch.as_tensor(other[key])) for key in other)


def test_who_writes_to_one_tensor_has_not_written_to_the_others():
    store = token_store([[1, 2, 3], [4, 5], [6]])
    batch = collate(store, pack(store.lengths, 5), [0, 1])
    for given in (batch, pickle.loads(pickle.dumps(batch))):
        ids, labels = given["input_ids"], given["labels"]
        before = ids._version
        labels[0, 0] = 7
        assert ids._version == before
        assert torch.equal(pickle.loads(pickle.dumps(given))["labels"], labels)
