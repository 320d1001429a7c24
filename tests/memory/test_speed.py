import math
import random
from collections.abc import Callable

import pytest

from lightning_memkit.memory.speed import FastestSize, smaller_sizes


def curve(draw: random.Random) -> Callable[[int], float]:
    """Seconds a sample with one lowest point: a cost by part, a cost that grows with the part, or both."""
    overhead, growth = draw.uniform(0, 2), draw.uniform(0, 0.1)
    return lambda size: 1 + overhead / size + growth * math.log2(size)


def settle(
    fastest: FastestSize, seconds_per_sample: Callable[[int, int], float], samples: int = 64
) -> list[int]:
    """The sizes that were asked for, step by step, until the choice."""
    asked: list[int] = []
    while fastest.settled is None:
        asked.append(fastest.next_size())
        fastest.observe(asked[-1], seconds_per_sample(asked[-1], len(asked)) * samples, samples)
    return asked


@pytest.mark.parametrize(
    ("most", "largest", "sizes"),
    [
        (64, 64, (64, 32, 16, 8, 4, 2)),
        (32, 11, (11, 6, 3, 2, 1)),
        (8, 3, (3, 2, 1)),
        (1, 1, (1,)),
        (7, 1, (1,)),
    ],
)
def test_smaller_sizes_double_the_parts(most: int, largest: int, sizes: tuple[int, ...]) -> None:
    assert smaller_sizes(most, largest) == sizes


@pytest.mark.parametrize("seed", range(100))
def test_without_noise_the_best_is_found_up_to_the_margin(seed: int) -> None:
    """The oracle knows every size's time."""
    draw = random.Random(seed)
    time = curve(draw)
    sizes = smaller_sizes(draw.randint(1, 128), draw.choice([1, 5, 33, 128]))
    fastest = FastestSize(sizes)
    asked = settle(fastest, lambda size, step: time(size))
    assert fastest.settled is not None
    assert time(fastest.settled) <= min(map(time, sizes)) / (1 - 0.02)
    assert fastest.steps == len(asked) <= 40


def test_with_noise_three_percent_are_lost_in_one_of_fifty_runs_at_most() -> None:
    short = 0
    for seed in range(500):
        draw = random.Random(seed)
        time, sizes = curve(draw), smaller_sizes(64, 64)
        fastest = FastestSize(sizes)
        settle(fastest, lambda size, step, t=time, d=draw: t(size) * math.exp(d.gauss(0, 0.02)))
        assert fastest.settled is not None
        short += min(map(time, sizes)) < 0.97 * time(fastest.settled)
    assert short <= 10


@pytest.mark.parametrize("best", [64, 16, 2])
@pytest.mark.parametrize("drift", [0.98, 1.02])
def test_a_machine_that_drifts_does_not_decide(drift: float, best: int) -> None:
    fastest = FastestSize(smaller_sizes(64, 64))
    settle(fastest, lambda size, step: drift**step * (1 + 0.08 * abs(math.log2(size / best))))
    assert fastest.settled == best


def test_first_steps_and_one_interruption_do_not_decide() -> None:
    seen: set[int] = set()

    def seconds(size: int, step: int) -> float:
        first = size not in seen
        seen.add(size)
        interrupted = step == 12
        return (1 if size == 32 else 1.1) * (5 if first else 1) * (3 if interrupted else 1)

    fastest = FastestSize((64, 32, 16))
    settle(fastest, seconds)
    assert fastest.settled == 32


def test_the_largest_stays_unless_beaten_by_more_than_the_margin() -> None:
    for gain, expected in ((0.985, 64), (0.97, 16)):
        fastest = FastestSize((64, 32, 16))
        settle(fastest, lambda size, step, gain=gain: gain if size == 16 else 1.0)
        assert fastest.settled == expected
        assert fastest.held_by_memory is (expected == 64)


def test_sizes_beyond_two_slower_ones_are_never_tried() -> None:
    fastest = FastestSize(smaller_sizes(64, 64))
    asked = settle(fastest, lambda size, step: 1 + 64 / size)
    assert set(asked) == {64, 32, 16}
    assert fastest.settled == 64


def test_times_count_by_the_work_of_the_batch() -> None:
    """Batches of very unlike lengths: seconds alone would prefer whatever met the short ones."""
    fastest, step = FastestSize((64, 32, 16)), 0
    while fastest.settled is None:
        size, step = fastest.next_size(), step + 1
        samples = 1000.0 if step % 2 else 10.0
        fastest.observe(size, samples * (1.0 if size == 32 else 1.2), samples)
    assert fastest.settled == 32
    assert fastest.seconds_per_sample == {64: 1.2, 32: 1.0, 16: 1.2}


def test_most_steps_bounds_the_search() -> None:
    fastest = FastestSize(smaller_sizes(64, 64), most_steps=5)
    assert len(settle(fastest, lambda size, step: 1 + math.log2(size))) == 5
    assert fastest.settled == 32  # the smallest that was timed


def test_what_nothing_is_known_of_is_the_largest() -> None:
    fastest = FastestSize((8, 4))
    assert fastest.best == 8
    fastest.observe(8, 1.0, 0)  # an empty batch says nothing
    fastest.observe(5, 1.0, 1)  # nor does a size that was not asked for
    assert fastest.steps == 0


def test_a_size_that_ran_out_of_memory_is_never_asked_for_again() -> None:
    for fail_at in range(1, 24):
        fastest = FastestSize(smaller_sizes(64, 64))
        step = 0
        while fastest.settled is None:
            size, step = fastest.next_size(), step + 1
            assert step <= fail_at or size <= 16
            if step == fail_at:
                fastest.limit(16)
            else:
                fastest.observe(size, 1.0 if size > 16 else 1.1 if size == 16 else 1.3, 1)
        assert fastest.settled == (16 if step >= fail_at else 64)


def test_below_all_sizes_the_limit_itself_is_the_choice() -> None:
    fastest = FastestSize((64, 32))
    fastest.limit(5)
    assert fastest.settled == fastest.next_size() == 5
    fastest.limit(2)
    assert fastest.settled == 2


@pytest.mark.parametrize("sizes", [(), (4, 8), (8, 8, 4)])
def test_sizes_that_do_not_fall_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="largest first"):
        FastestSize(sizes)
