import numpy as np
import pytest
import torch

from lightning_memkit.data.batching.batch import PackedBatch
from lightning_memkit.data.loading.host_memory import (
    HostMemory,
    host_room,
    loader_memory,
    parse_room,
    tokens_a_part,
)
from lightning_memkit.data.loading.loader import LoaderOptions, PackedLoader, PackedRows
from lightning_memkit.data.packing.pack import pack
from lightning_memkit.data.sources.token_records import token_store


def loader(batch_size: int = 16, **options) -> PackedLoader:
    lengths = np.random.default_rng(0).integers(1, 20, 400)
    store = token_store(np.split(np.arange(1, lengths.sum() + 1), np.cumsum(lengths)[:-1]))
    rows = PackedRows(store=store, packing=pack(lengths, 32), multiple_of=8)
    return PackedLoader(rows, LoaderOptions(batch_size=batch_size, **options))


def same(one: PackedBatch, two: PackedBatch) -> bool:
    return one.keys() == two.keys() and all(
        torch.equal(one[key], two[key]) if isinstance(one[key], torch.Tensor) else one[key] == two[key]
        for key in one
    )


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a single core
@pytest.mark.parametrize("room", [1, 40_000])
def test_parts_that_are_put_together_are_the_batch(room):
    whole = list(loader())
    in_parts = loader(num_workers=2, room=HostMemory(shared_bytes=room, ram_bytes=10**9))
    assert in_parts._part < in_parts.plan.most_tokens
    again = list(in_parts)
    assert len(again) == len(whole)
    assert all(same(one, two) for one, two in zip(whole, again, strict=True))


@pytest.mark.parametrize("sizes", [[16], [1, 15], [5, 5, 6]])
def test_joining_undoes_a_split(sizes):
    batch = next(iter(loader()))
    assert same(PackedBatch.joined(batch.split(sizes), 16), batch)


def test_the_price_is_of_what_is_under_way():
    batch = 1000 * 24
    price = loader_memory(1000, num_workers=4, prefetch=3)
    assert price.shared_bytes == 14 * batch
    assert price.ram_bytes == 14 * batch + 4 * 2 * batch
    assert loader_memory(1000, num_workers=0).shared_bytes == 0
    parts = loader_memory(1000, num_workers=4, prefetch=3, tokens_a_part=100)
    assert parts.shared_bytes == 14 * batch // 10
    assert parts.ram_bytes == (14 + 8) * batch // 10 + batch


def test_a_batch_counts_as_many_bytes_a_token_as_it_has():
    batch = next(iter(loader()))
    held = sum(batch[key].nbytes for key in ("input_ids", "labels", "position_ids"))
    priced = loader_memory(batch["input_ids"].numel(), num_workers=1, prefetch=1).shared_bytes
    assert held * 3 == priced  # one being built or waiting, one received ahead, one in use


def test_parts_shrink_until_they_fit_and_no_further_than_a_row():
    room = HostMemory(shared_bytes=200_000, ram_bytes=10**9)
    part = tokens_a_part(100_000, 100, room, num_workers=2)
    assert loader_memory(100_000, num_workers=2, tokens_a_part=part).shared_bytes <= 200_000
    assert loader_memory(100_000, num_workers=2, tokens_a_part=2 * part).shared_bytes > 200_000
    assert tokens_a_part(100_000, 100, HostMemory(shared_bytes=0, ram_bytes=0), num_workers=2) == 100
    assert tokens_a_part(100_000, 100, HostMemory(shared_bytes=0, ram_bytes=0), num_workers=0) == 100_000


def test_the_room_is_shared_by_the_processes_of_a_machine():
    alone, four = host_room(), host_room(4)
    assert 0 < four.ram_bytes <= alone.ram_bytes // 3
    assert parse_room("auto") is None
    assert parse_room("1GiB") == HostMemory(shared_bytes=2**30, ram_bytes=2**30)
    with pytest.raises(ValueError, match="'much' is not a size"):
        parse_room("much")
