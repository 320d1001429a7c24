"""A plain DataLoader with changing workers: against torch's own, batch for batch and number for number."""

import os
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from lightning_memkit.data.loading.load_times import LoadTimes
from lightning_memkit.data.loading.resumable_loader import (
    ResumableLoader,
    why_not_resumable,
    with_other_ranks,
)
from lightning_memkit.data.loading.worker_batches import BatchError

SAMPLES = 23
NUMBERS: Any = list(range(SAMPLES))
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class DrawsAlways:
    """A batch sampler that draws from all global numbers for every batch."""

    def __iter__(self):
        for _ in range(len(self)):
            yield [
                random.randrange(SAMPLES),
                int(np.random.randint(SAMPLES)),
                int(torch.randint(SAMPLES, ())),
            ]

    def __len__(self):
        return 6


class Augmented(Dataset):
    def __getitem__(self, index):
        return [index + random.random(), index + np.random.rand(), index + float(torch.rand(()))]

    def __len__(self):
        return SAMPLES


def generator():
    return torch.Generator().manual_seed(3)


LOADERS = {
    "sequential": lambda **options: DataLoader(NUMBERS, batch_size=4, **options),
    "shuffled": lambda **options: DataLoader(NUMBERS, batch_size=4, shuffle=True, **options),
    "generator": lambda **options: DataLoader(
        NUMBERS, batch_size=4, shuffle=True, generator=generator(), **options
    ),
    "drop_last": lambda **options: DataLoader(NUMBERS, batch_size=4, shuffle=True, drop_last=True, **options),
    "replaced": lambda **options: DataLoader(
        NUMBERS, batch_size=4, sampler=RandomSampler(NUMBERS, replacement=True, num_samples=70), **options
    ),
    "weighted": lambda **options: DataLoader(
        NUMBERS, batch_size=4, sampler=WeightedRandomSampler(range(1, SAMPLES + 1), 21), **options
    ),
    "batch_sampler": lambda **options: DataLoader(
        NUMBERS, batch_sampler=BatchSampler(RandomSampler(NUMBERS), 5, False), **options
    ),
    "no_batches": lambda **options: DataLoader(NUMBERS, batch_size=None, shuffle=True, **options),
    "distributed": lambda **options: DataLoader(
        NUMBERS, batch_size=4, sampler=DistributedSampler(NUMBERS, 2, 1), **options
    ),
}


SWEPT = [
    pytest.param(name, marks=[] if name in ("shuffled", "generator", "distributed") else pytest.mark.slow)
    for name in LOADERS
]


def plain(batches):
    return [np.asarray(batch).tolist() for batch in batches]


def epochs(loader, number=3, between=lambda: None):
    """The batches of some epochs, and the global numbers behind them."""
    found = []
    for _ in range(number):
        found.append(plain(loader))
        between()
    return found, [random.random(), float(np.random.rand()), float(torch.rand(()))]


def seed():
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


@pytest.mark.parametrize("name", SWEPT)
@pytest.mark.parametrize("as_made", [0, 2])
@pytest.mark.long
def test_batches_and_global_numbers_are_those_of_torchs_loader_whatever_the_workers(name, as_made):
    draws = lambda: torch.rand(3)  # noqa: E731 # as a training step with dropout would
    seed()
    expected = epochs(LOADERS[name](num_workers=as_made), between=draws)
    for num_workers in (0, 3):
        seed()
        loader = ResumableLoader(LOADERS[name](num_workers=as_made))
        loader.set_workers(num_workers, 2)
        assert epochs(loader, between=draws) == expected


@pytest.mark.parametrize("name", SWEPT)
def test_workers_may_change_between_any_two_batches(name):
    seed()
    expected = epochs(LOADERS[name]())
    seed()
    loader = ResumableLoader(LOADERS[name]())
    found = []
    for epoch in range(3):
        batches = []
        for number, batch in enumerate(loader):
            batches.append(np.asarray(batch).tolist())
            if number % 2 == 0:
                loader.set_workers((number + epoch) % 3, 1 + number % 3)
        found.append(batches)
    assert found == expected[0]


@pytest.mark.parametrize("name", SWEPT)
@pytest.mark.parametrize("done", [1, 2])
@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0)])
def test_a_resumed_epoch_goes_on_with_the_batch_that_came_next(name, done, before, after):
    seed()
    first = ResumableLoader(LOADERS[name]())
    first.set_workers(before, 2)
    plain(first)
    iterator = iter(first)
    for _ in range(done):
        next(iterator)
    state = first.state_dict()
    rest = plain(iterator) + (plain(first) if name == "generator" else [])

    torch.manual_seed(99)
    second = ResumableLoader(LOADERS[name]())
    second.set_workers(after, 2)
    second.load_state_dict(state)
    assert plain(second) + (plain(second) if name == "generator" else []) == rest


def test_a_resume_draws_nothing_from_the_global_numbers():
    first = ResumableLoader(LOADERS["shuffled"]())
    next(iter(first))
    second = ResumableLoader(LOADERS["shuffled"]())
    second.load_state_dict(first.state_dict())
    seed()
    plain(second)
    found = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    seed()
    assert found == [random.random(), float(np.random.rand()), float(torch.rand(()))]


def test_a_state_at_the_epochs_end_begins_the_next_and_keeps_the_generator():
    first = ResumableLoader(LOADERS["generator"]())
    plain(first)
    second = ResumableLoader(LOADERS["generator"]())
    second.load_state_dict(first.state_dict())
    assert plain(second) == plain(first)
    assert second.state_dict()["batches_done"] == 0


def test_a_loader_made_anew_before_its_first_batch_draws_on_from_its_generator():
    first, data = ResumableLoader(LOADERS["generator"]()), LOADERS["generator"]()
    plain(first)
    ResumableLoader(data).load_state_dict(first.state_dict())
    assert plain(ResumableLoader(data)) == plain(first)


@pytest.mark.parametrize("as_batch_sampler", [False, True])
def test_a_resumed_epoch_is_the_saved_one_whichever_was_announced_since(as_batch_sampler):
    def loader():
        sampler = DistributedSampler(NUMBERS, 2, 1)
        if as_batch_sampler:
            return ResumableLoader(
                DataLoader(NUMBERS, batch_sampler=BatchSampler(sampler, 4, False))
            ), sampler
        return ResumableLoader(DataLoader(NUMBERS, batch_size=4, sampler=sampler)), sampler

    (first, sampler), (second, resumed) = loader(), loader()
    sampler.set_epoch(5)
    iterator = iter(first)
    next(iterator)
    second.load_state_dict(first.state_dict())
    resumed.set_epoch(6)
    assert plain(second) == plain(iterator)
    resumed.set_epoch(6)
    sampler.set_epoch(6)
    assert plain(second) == plain(first)


def test_a_state_that_is_not_yet_used_is_given_on():
    first = ResumableLoader(LOADERS["shuffled"]())
    next(iter(first))
    state = first.state_dict()
    second = ResumableLoader(LOADERS["shuffled"]())
    second.load_state_dict(state)
    for _ in range(2):
        iter(second)
    assert second.state_dict() == state
    assert len(plain(second)) == len(second) - 1


def test_a_state_of_other_data_is_refused_and_one_is_a_checkpoint_for_weights_only(tmp_path):
    loader = ResumableLoader(LOADERS["shuffled"]())
    next(iter(loader))
    torch.save(loader.state_dict(), tmp_path / "state")
    state = torch.load(tmp_path / "state", weights_only=True)
    again = ResumableLoader(LOADERS["shuffled"]())
    again.load_state_dict(state)
    assert len(plain(again)) == len(again) - 1
    with pytest.raises(ValueError, match="an epoch of 6 batches, and this one has 5"):
        ResumableLoader(LOADERS["drop_last"]()).load_state_dict(state)


@pytest.mark.parametrize("done", [None, 2])
def test_a_sampler_that_draws_for_every_batch_has_numbers_of_its_own(done):
    def batches(num_workers, between):
        seed()
        loader = ResumableLoader(DataLoader(NUMBERS, batch_sampler=DrawsAlways()))  # pyright: ignore[reportArgumentType]
        loader.set_workers(num_workers, 2)
        found = []
        for number, batch in enumerate(loader):
            found.append(batch.tolist())
            between()
            if number + 1 == done:
                state = loader.state_dict()
                loader = ResumableLoader(DataLoader(NUMBERS, batch_sampler=DrawsAlways()))  # pyright: ignore[reportArgumentType]
                loader.load_state_dict(state)
                return found + plain(loader)
        return found

    expected = batches(0, lambda: None)
    assert len({tuple(batch) for batch in expected}) == 6
    for num_workers in (0, 2):
        assert batches(num_workers, lambda: (random.random(), np.random.rand(), torch.rand(2))) == expected


def test_augmentation_depends_on_epoch_batch_and_rank_and_not_on_workers():
    def batches(num_workers, rank=0):
        seed()
        loader = ResumableLoader(DataLoader(Augmented(), batch_size=4), rank=rank)
        loader.set_workers(num_workers, 2)
        return epochs(loader, 2)

    (first, second), _ = expected = batches(0)
    assert batches(2) == expected
    assert first != second
    assert batches(0, rank=1)[0] != expected[0]
    assert len({value % 1 for batch in first for value in np.ravel(batch)}) == 3 * SAMPLES


def test_workers_start_as_the_users_loader_says():
    def told(index):
        info = get_worker_info()
        return 0 if info is None else started[0] * 10 + len(info.dataset)  # pyright: ignore[reportArgumentType]

    class Tells(Dataset):
        def __getitem__(self, index):
            return told(index)

        def __len__(self):
            return 3

    started = [0]

    def on_start(_):
        started[0] += 7

    loader = ResumableLoader(DataLoader(Tells(), worker_init_fn=on_start))
    loader.set_workers(1, 2)
    assert plain(loader) == [[73]] * 3
    assert started == [0]


def test_workers_persist_only_where_the_users_do():
    class Process(Dataset):
        def __getitem__(self, _):
            return os.getpid()

        def __len__(self):
            return 3

    for persistent in (True, False):
        loader = ResumableLoader(DataLoader(Process(), num_workers=1, persistent_workers=persistent))
        one, two = (set(np.ravel(plain(loader))) for _ in range(2))
        assert (one == two) is persistent
        assert os.getpid() not in one


def test_a_data_set_may_give_a_batch_at_once_and_tell_what_it_took():
    class Together(Dataset):
        def __getitems__(self, indices):
            return [index * 10 for index in indices]

        def __len__(self):
            return 4

    loader = ResumableLoader(DataLoader(Together(), batch_size=2))
    loader.times = times = LoadTimes()
    loader.set_workers(1, 2)
    assert plain(loader) == [[0, 10], [20, 30]]
    assert len(times._loads) == 2


def test_a_failed_batch_is_named():
    samples: Any = [1, 2, None, 4]
    loader = ResumableLoader(DataLoader(samples, batch_size=1))
    loader.set_workers(1, 2)
    with pytest.raises(BatchError, match="Batch 2 of the epoch was not built"):
        plain(loader)


def test_what_is_copied_on_the_way_is_not_counted_before_it_is_used():
    def one_ahead(batches):
        waiting = next(batches)
        for batch in batches:
            yield waiting
            waiting = batch
        yield waiting

    loader = ResumableLoader(LOADERS["sequential"]())
    loader.on_the_way = one_ahead
    iterator = iter(loader)
    assert next(iterator).tolist() == NUMBERS[:4]
    assert loader.state_dict()["batches_done"] == 1
    loader.set_workers(1, 2)
    assert plain(iterator) == plain(LOADERS["sequential"]())[1:]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(NUMBERS)


class OwnLoader(DataLoader):
    def __iter__(self):
        return super().__iter__()


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (NUMBERS, "list is no torch DataLoader"),
        (DataLoader(Stream()), "Stream is an IterableDataset"),
        (OwnLoader(NUMBERS), "OwnLoader iterates in a way of its own"),
        (DataLoader(NUMBERS, in_order=False), "in_order=False"),
        (DataLoader(NUMBERS, sampler=iter(NUMBERS), batch_size=None), "has no length"),
        (DataLoader(NUMBERS), None),
    ],
)
def test_what_can_not_be_wrapped_says_why(loader, why):
    found = why_not_resumable(loader)
    assert (found is None) if why is None else (why in (found or ""))


def test_another_number_of_ranks_goes_on_with_the_same_samples_a_step_and_others_are_refused():
    def of_rank(rank: int, ranks: int, batch_size: int) -> ResumableLoader:
        numbers: Any = torch.arange(60)
        sampler: Any = DistributedSampler(numbers, ranks, rank, seed=3)
        loader = DataLoader(numbers, batch_size=batch_size, sampler=sampler)
        return ResumableLoader(loader, rank=rank, ranks=ranks)

    one = of_rank(0, 4, 3)
    batches = iter(one)
    next(batches), next(batches)
    state = one.state_dict()
    done = [index for rank in range(4) for batch in list(of_rank(rank, 4, 3))[:2] for index in batch.tolist()]
    for ranks in (1, 2, 3):
        left = []
        for rank in range(ranks):
            resumed = of_rank(rank, ranks, 12 // ranks)
            resumed.load_state_dict(state)
            left += [index for batch in resumed for index in batch.tolist()]
        assert sorted(done + left) == list(range(60))
    with pytest.raises(ValueError, match="samples_per_step: 12 then, 13 now"):
        of_rank(0, 1, 13).load_state_dict(state)
    with pytest.raises(ValueError, match="sampler: DistributedSampler then, RandomSampler now"):
        ResumableLoader(DataLoader(torch.arange(60), 12, shuffle=True)).load_state_dict(state)  # pyright: ignore[reportArgumentType]


class Drawn(Sampler):
    """Batches of a seed's order; `counts` draws by how often it was asked, as well."""

    def __init__(self, seed: int, *, size: int = 4, counts: bool = False) -> None:
        self.seed, self.size, self.counts, self.asked = seed, size, counts, 0

    def __iter__(self):
        self.asked += self.counts
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.seed + self.asked))
        return iter(order.split(self.size)) if self.size else iter(order.tolist())

    def __len__(self):
        return -(-SAMPLES // self.size) if self.size else SAMPLES


OTHER_ORDERS = {
    "weights": lambda now: {"sampler": WeightedRandomSampler(range(1 + 9 * now, SAMPLES + 1 + 9 * now), 21)},
    "subset": lambda now: {"sampler": SubsetRandomSampler(range(now, 20 + now))},
    "replacement": lambda now: {"sampler": RandomSampler(NUMBERS, replacement=now)},
    "seed of a sampler": lambda now: {"sampler": Drawn(now, size=0)},
    "seed of a batch sampler": lambda now: {"batch_sampler": Drawn(now)},
    "seed of single samples": lambda now: {"batch_size": None, "sampler": Drawn(now, size=0)},
    "generator": lambda now: {"shuffle": True, "generator": generator() if now else None},
    "what a batch sampler batches": lambda now: {
        "batch_sampler": BatchSampler(SubsetRandomSampler(range(now, 20 + now)), 4, False)
    },
}


@pytest.mark.parametrize("name", list(OTHER_ORDERS))
def test_a_sampler_that_gives_another_order_than_then_is_refused(name):
    def loader(now):
        options = {"batch_size": 4} if "batch_sampler" not in OTHER_ORDERS[name](now) else {}
        return ResumableLoader(DataLoader(NUMBERS, **{**options, **OTHER_ORDERS[name](now)}))

    seed()
    first = loader(False)
    iterator = iter(first)
    next(iterator), next(iterator)
    state, rest = first.state_dict(), plain(iterator)
    same, other = loader(False), loader(True)
    same.load_state_dict(state)
    assert plain(same) == rest
    other.load_state_dict(state)
    with pytest.raises(ValueError, match=r"gives other samples for the epoch's first 2 batch\(es\)"):
        plain(other)


def test_a_sampler_that_keeps_a_counter_is_refused_within_its_second_epoch():
    first, second = (
        ResumableLoader(DataLoader(NUMBERS, 4, sampler=Drawn(1, size=0, counts=True))) for _ in "12"
    )
    plain(first)
    next(iter(first))
    second.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="one that keeps a counter"):
        plain(second)


@pytest.mark.parametrize("done", [0, 2])
@pytest.mark.parametrize("kind", ["sampler", "batch sampler", "weights"])
def test_a_samplers_own_generator_goes_on_in_the_second_epoch(kind, done):
    def loader():
        sampler: Any = RandomSampler(NUMBERS, generator=generator())
        if kind == "weights":
            sampler = WeightedRandomSampler(range(1, SAMPLES + 1), 21, generator=generator())
        if kind == "batch sampler":
            return ResumableLoader(DataLoader(NUMBERS, batch_sampler=BatchSampler(sampler, 4, False)))
        return ResumableLoader(DataLoader(NUMBERS, 4, sampler=sampler))

    first, second = loader(), loader()
    plain(first)
    iterator = iter(first)
    batches = [next(iterator) for _ in range(done)]
    assert len(batches) == done
    second.load_state_dict(first.state_dict())
    assert plain(second) == plain(iterator if done else first)
    assert plain(second) == plain(first)


def test_ranks_that_draw_in_their_own_way_go_on_each_where_it_stood():
    def of_rank(rank: int, ranks: int = 2) -> ResumableLoader:
        own = torch.Generator().manual_seed(rank)
        return ResumableLoader(DataLoader(NUMBERS, 4, shuffle=True, generator=own), rank=rank, ranks=ranks)

    loaders = [of_rank(rank) for rank in range(2)]
    iterators = [iter(loader) for loader in loaders]
    for iterator in iterators:
        next(iterator), next(iterator)
    state = with_other_ranks([loader.state_dict() for loader in loaders])
    for rank, iterator in enumerate(iterators):
        resumed = of_rank(rank)
        resumed.load_state_dict(state)
        assert plain(resumed) == plain(iterator)
        assert plain(resumed) == plain(loaders[rank])
    with pytest.raises(ValueError, match="ranks: 2 then, 3 now"):
        of_rank(0, 3).load_state_dict(state)
