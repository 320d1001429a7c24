"""Whatever builds the batches, order and generators are those of torch's loader: compared after every batch."""

import random
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, WeightedRandomSampler

from lightning_memkit.data.batching.random_numbers import GlobalNumbers
from lightning_memkit.data.loading.resumable_loader import ResumableLoader

SAMPLES, SIZE = 23, 4
NUMBERS: Any = list(range(SAMPLES))
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def shuffled(generator, options):
    return DataLoader(NUMBERS, SIZE, shuffle=True, generator=generator, **options)


def replaced(generator, options):
    # draws again within an epoch: its numbers come 32 at a time
    sampler = RandomSampler(NUMBERS, replacement=True, num_samples=70, generator=generator)
    return DataLoader(NUMBERS, 16, sampler=sampler, generator=generator, **options)


def weighted(generator, options):
    sampler = WeightedRandomSampler([1.0] * SAMPLES, 18, generator=generator)
    return DataLoader(NUMBERS, SIZE, sampler=sampler, **options)


STAYS = {"num_workers": 1, "persistent_workers": True}
MADE_WITH = [
    pytest.param({}, id="no workers"),
    pytest.param({"num_workers": 1}, id="a worker", marks=pytest.mark.slow),
    pytest.param({"num_workers": 2, "prefetch_factor": 1}, id="workers"),
    pytest.param(STAYS, id="a worker that stays"),
    pytest.param({**STAYS, "num_workers": 2}, id="workers that stay", marks=pytest.mark.slow),
]
KINDS = [shuffled, replaced, pytest.param(weighted, marks=pytest.mark.slow)]


def numbers(generator):
    seen = [random.getstate()[1][-1], float(np.random.rand()), torch.get_rng_state().sum().item()]
    return [*seen, None if generator is None else generator.get_state().tolist()]


def step():
    torch.rand(3)  # as dropout would


def trained(loader, ends, generator, between=lambda at: None, begun=0):
    """Batches, and the generators after each, of epochs that end after `ends` batches."""
    found = []
    for epoch, end in enumerate(ends):
        # Lightning requests the first iterator twice
        iterator = iter(loader) if epoch or begun else (iter(loader), iter(loader))[1]
        for number, batch in enumerate(islice(iterator, end)):
            step()
            found.append([np.asarray(batch).tolist(), numbers(generator)])
            between((epoch, number))
    return found


def made(kind, options, is_given):
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(3) if is_given else None
    return kind(generator, options), generator


@pytest.mark.sampled(8)
@pytest.mark.parametrize("is_given", [False, True], ids=["global", "generator"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", MADE_WITH)
@pytest.mark.parametrize("ends", [(9, 9, 9), (2, 1, 3)], ids=["whole", "early"])
def test_batches_and_generators_are_torchs_after_every_batch(kind, options, is_given, ends):
    loader, generator = made(kind, options, is_given)
    expected = trained(loader, ends, generator)
    for before, after in ((0, 2), (2, 0)):
        loader, generator = made(kind, options, is_given)
        loader = ResumableLoader(loader)
        loader.set_workers(before, 2)

        def between(at, loader=loader, after=after):
            if at == (1, 0):
                loader.set_workers(after, 3)

        assert trained(loader, ends, generator, between) == expected, (before, after)


@pytest.mark.parametrize("is_given", [False, True], ids=["global", "generator"])
@pytest.mark.parametrize("kind", [shuffled, pytest.param(replaced, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", MADE_WITH)
@pytest.mark.parametrize("at", [(0, 1), (1, 0), (1, 2)])
@pytest.mark.long
def test_what_is_resumed_goes_on_as_torchs_loader_does(kind, options, is_given, at):
    limit = 3
    ends = (limit, limit, limit)
    loader, generator = made(kind, options, is_given)
    expected = trained(loader, ends, generator)
    loader, generator = made(kind, options, is_given)
    loader, saved = ResumableLoader(loader), []
    loader.epoch_batches = limit

    def save(here):
        if here == at:
            saved.append((loader.state_dict(), GlobalNumbers()))

    trained(loader, ends, generator, save)
    (state, outside) = saved[0]
    loader, generator = made(kind, options, is_given)
    loader = ResumableLoader(loader)
    loader.epoch_batches = limit
    loader.set_workers(0, 2)
    loader.load_state_dict(state)
    outside.restore()
    done = at[0] * limit + at[1] + 1
    left = [limit - done % limit, *ends[done // limit + 1 :]]
    assert trained(loader, left, generator, begun=done) == expected[done:]


class Augmented(Dataset):
    def __getitem__(self, index):
        return float(torch.rand(()))

    def __len__(self):
        return 4


def test_workers_that_stay_augment_every_epoch_anew_and_as_no_workers_do():
    found = []
    for workers in (0, 1):
        torch.manual_seed(1)
        loader = ResumableLoader(DataLoader(Augmented(), 2, num_workers=1, persistent_workers=True))
        loader.set_workers(workers, 2)
        found.append([torch.cat(list(loader)).tolist() for _ in range(3)])
    assert found[0] == found[1]
    assert len({value for epoch in found[0] for value in epoch}) == 12


def test_a_loader_with_a_standing_iterator_draws_no_seed_for_its_workers():
    loader, generator = made(shuffled, STAYS, False)
    list(loader)
    expected = trained(loader, (9, 9), generator, begun=1)
    loader, generator = made(shuffled, STAYS, False)
    list(loader)
    assert trained(ResumableLoader(loader), (9, 9), generator, begun=1) == expected
