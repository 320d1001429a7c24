import multiprocessing
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_memkit.data.loading.loader import LoaderOptions, PackedLoader, PackedRows
from lightning_memkit.data.packing.pack import pack
from lightning_memkit.data.sources.token_records import token_store


def rows_of(count: int, context: int = 8) -> PackedRows:
    """So many rows of one document each; every token of the corpus is another."""
    lengths = np.random.default_rng(0).integers(1, context + 1, count)
    store = token_store(np.split(np.arange(1, lengths.sum() + 1), np.cumsum(lengths)[:-1]))
    return PackedRows(store=store, packing=pack(lengths, context, packing="none"))


def loader_of(count: int = 30, *, rank: int = 0, world_size: int = 1, **options) -> PackedLoader:
    return PackedLoader(
        rows_of(count), LoaderOptions(**{"batch_size": 4, **options}), rank=rank, world_size=world_size
    )


def tokens(batch) -> list[int]:
    return batch["input_ids"][batch["input_ids"] > 0].tolist()


def epoch(loader) -> list[list[int]]:
    return [tokens(batch) for batch in loader]


@settings(max_examples=150, deadline=None)
@given(
    count=st.integers(8, 70),
    batch_size=st.integers(2, 5),
    world_size=st.sampled_from([1, 2, 4]),
    interrupted=st.integers(0, 40),
)
def test_an_epoch_holds_every_token_once_over_all_ranks_and_a_resume(
    count, batch_size, world_size, interrupted
):
    seen, batches = [], set()
    for rank in range(world_size):
        options = {"batch_size": batch_size, "rank": rank, "world_size": world_size}
        first, second = loader_of(count, **options), loader_of(count, **options)
        iterator = iter(first)
        parts = [tokens(next(iterator)) for _ in range(min(interrupted, len(first) - 1))]
        second.load_state_dict(first.state_dict())
        parts += epoch(second)
        assert parts == epoch(loader_of(count, **options))
        assert all(parts)
        batches.add(len(parts))
        seen += [token for part in parts for token in part]
    assert batches == {len(first)}
    assert sorted(seen) == list(range(1, len(first.rows.store.tokens) + 1))
    assert first.dropped_rows == 0


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a single core
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("done", [0, 3, 7])
@pytest.mark.long
def test_workers_and_their_number_change_nothing(world_size, done):
    for rank in range(world_size):
        plain = loader_of(61, rank=rank, world_size=world_size)
        whole = epoch(plain) + epoch(plain)
        for num_workers in (1, 2):
            loader = loader_of(61, rank=rank, world_size=world_size, num_workers=num_workers)
            loader.load_state_dict({**plain.state_dict(), "epoch": 0, "batches_done": done})
            assert epoch(loader) + epoch(loader) == whole[done:]


def test_the_state_is_the_same_on_every_rank_and_small():
    loaders = [loader_of(rank=rank, world_size=2) for rank in range(2)]
    for loader in loaders:
        next(iter(loader))
    states = [loader.state_dict() for loader in loaders]
    assert states[0] == states[1]
    assert (states[0]["epoch"], states[0]["batches_done"]) == (0, 1)
    assert len(repr(states[0])) < 300


def test_a_finished_epoch_is_followed_by_the_next():
    loader = loader_of()
    first, second = epoch(loader), epoch(loader)
    assert first != second
    resumed = loader_of()
    resumed.load_state_dict({**loader.state_dict(), "epoch": 0, "batches_done": len(loader)})
    assert epoch(resumed) == second


def test_set_epoch_chooses_the_order():
    loader = loader_of()
    epoch(loader)
    second = epoch(loader)
    other = loader_of()
    other.set_epoch(1)
    assert epoch(other) == second


def test_an_epoch_that_was_left_early_is_followed_by_the_next():
    left, finished = loader_of(), loader_of()
    next(iter(left))
    epoch(finished)
    assert epoch(left) == epoch(finished)


def test_asking_for_an_iterator_draws_nothing():
    loader = loader_of()
    iter(loader)
    assert epoch(loader) == epoch(loader_of())


def test_an_iterator_that_was_replaced_no_longer_moves_the_state():
    loader = loader_of()
    old = iter(loader)
    next(old)
    new = iter(loader)
    next(new)
    next(old)
    next(old)
    assert loader.state_dict()["batches_done"] == 1


def test_without_shuffling_rows_keep_their_order():
    loader = loader_of(10, shuffle=False)
    flat = [token for batch in epoch(loader) for token in batch]
    assert flat == sorted(flat)
    assert epoch(loader) == epoch(loader)


@pytest.mark.parametrize(
    ("count", "world_size", "sizes"),
    [(16, 2, [[4, 4], [4, 4]]), (19, 2, [[4, 4], [4, 4], [1, 2]]), (17, 2, [[4, 4], [3, 4], [1, 1]])],
)
def test_the_last_rows_are_shared_by_all_ranks(count, world_size, sizes):
    dealt = [
        [batch.rows for batch in loader_of(count, rank=rank, world_size=world_size)]
        for rank in range(world_size)
    ]
    assert [sorted(step) for step in zip(*dealt, strict=True)] == sizes


def test_rows_that_can_not_be_shared_are_dropped_and_counted():
    loader = loader_of(7, batch_size=1, world_size=2)
    assert (len(loader), loader.dropped_rows) == (3, 1)
    loader = loader_of(10, drop_last=True)
    assert (len(loader), loader.dropped_rows) == (2, 2)


def test_too_few_rows_are_refused():
    with pytest.raises(ValueError, match="1 rows are too few for batch_size=4 on 2 rank"):
        loader_of(1, world_size=2)
    with pytest.raises(ValueError, match="drop_last=True"):
        loader_of(3, drop_last=True)


def test_a_state_of_other_data_is_refused():
    state = loader_of(30).state_dict()
    with pytest.raises(ValueError, match="rows: 30 then, 31 now"):
        loader_of(31).load_state_dict(state)
    with pytest.raises(ValueError, match="seed: 0 then, 5 now"):
        loader_of(30, seed=5).load_state_dict(state)


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 1)])
def test_a_rank_outside_is_refused(rank, world_size):
    with pytest.raises(ValueError, match=f"rank={rank} is outside"):
        loader_of(rank=rank, world_size=world_size)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_nothing_is_drawn_from_torchs_or_numpys_global_numbers(num_workers):
    loader = loader_of(num_workers=num_workers)
    torch_before, numpy_before = torch.get_rng_state(), np.random.get_state(legacy=False)["state"]["key"]
    epoch(loader)
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert np.array_equal(np.random.get_state(legacy=False)["state"]["key"], numpy_before)


@pytest.mark.parametrize("keeps", [False, True])
def test_workers_are_kept_where_asked_and_change_between_two_batches(keeps):
    expected = loader_of(30)
    loader = loader_of(30, num_workers=1)
    loader.keeps_workers = keeps
    processes = []
    for _ in range(2):
        batches = []
        for batch in loader:
            batches.append(tokens(batch))
            processes.append({child.pid for child in multiprocessing.active_children()})
        assert batches == epoch(expected)
    assert (processes[0] == processes[-1]) is keeps
    iterator = iter(loader)
    batches = [tokens(next(iterator)), tokens(next(iterator))]
    for num_workers, prefetch in ((2, 1), (0, 2), (1, 3)):
        loader.set_workers(num_workers, prefetch)
        batches.append(tokens(next(iterator)))
        assert len(multiprocessing.active_children()) == num_workers
    del iterator  # in the midst of an epoch
    assert batches == epoch(expected)[:5]
    assert epoch(loader) == epoch(expected)
    loader.close()
    assert not multiprocessing.active_children()


def test_a_batch_is_pinned_where_asked(monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(1) or tensor)
    next(iter(loader_of(pin_memory=True)))
    assert len(pinned) == 4
    next(iter(loader_of()))
    assert len(pinned) == 4


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a single core
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_that_is_let_go_is_held_by_nobody(num_workers):
    batches = iter(loader_of(num_workers=num_workers))
    batch = next(batches)
    held = weakref.ref(batch["input_ids"].untyped_storage())
    del batch
    assert held() is None
