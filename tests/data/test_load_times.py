import pytest

from lightning_memkit.data.loading.load_times import LoadTimes


class Clock:
    """A clock that stands still until it is told to go on."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clocks():
    return Clock(), Clock()


@pytest.fixture
def times(clocks):
    times = LoadTimes(*clocks)
    run(times, clocks, [(0.0, 0.0, 0, 0)])  # the first of an iterator does not count
    times.fetch_begins()
    times.taken_stall_fraction()
    return times


def run(times, clocks, batches):
    """A wait and a step after the other: seconds, and seconds of the processor."""
    for wait, step, wait_cpu, step_cpu in batches:
        times.fetch_begins()
        clocks[0].now += wait
        clocks[1].now += wait_cpu
        times.fetch_ends()
        clocks[0].now += step
        clocks[1].now += step_cpu


def test_without_workers_loading_is_the_wait(times, clocks):
    run(times, clocks, [(9.0, 1.0, 0, 0), (2.0, 6.0, 1.0, 3.0), (4.0, 8.0, 2.0, 4.0), (1, 1, 1, 1)])
    measured = times.measured(warm_up=1)
    assert (measured.batches, measured.wait_seconds, measured.step_seconds) == (2, 3.0, 7.0)
    assert (measured.load_seconds, measured.longest_load_seconds) == (3.0, 4.0)
    assert (measured.load_processors, measured.step_processors) == (0.5, 0.5)
    assert measured.stall_fraction == pytest.approx(0.3)
    assert measured.batch_seconds == 10.0


def test_with_workers_loading_is_what_they_tell(times, clocks):
    for seconds in (5.0, 7.0):
        times.built(seconds, seconds / 4)
        run(times, clocks, [(0.1, 0.9, 0, 0)])
    times.fetch_begins()
    measured = times.measured()
    assert (measured.load_seconds, measured.longest_load_seconds) == (6.0, 7.0)
    assert measured.load_processors == pytest.approx(0.25)
    assert measured.stall_fraction == pytest.approx(0.1)


def test_a_batch_with_validation_behind_it_does_not_count(times, clocks):
    run(times, clocks, [(1.0, 3.0, 0, 0)])
    times.skip()
    clocks[0].now += 100
    run(times, clocks, [(2.0, 2.0, 0, 0)])
    times.fetch_begins()
    assert times.measured().batches == 1
    assert times.measured().stall_fraction == 0.5


def test_a_step_in_which_something_else_happened_is_no_step(times, clocks):
    run(times, clocks, [(0.0, 1.0, 0, 0)] * 9 + [(0.0, 50.0, 0, 0), (0.0, 1.0, 0, 0)])
    times.fetch_begins()
    assert times.measured().step_seconds == 1.0


def test_the_logged_fraction_is_that_since_it_was_taken_last_whatever_is_restarted(times, clocks):
    assert times.taken_stall_fraction() is None
    run(times, clocks, [(1.0, 3.0, 0, 0), (1.0, 0.0, 0, 0)])
    times.restart()
    times.fetch_begins()
    assert times.taken_stall_fraction() == pytest.approx(2 / 5)
    assert times.taken_stall_fraction() is None
    run(times, clocks, [(1.0, 1.0, 0, 0)])
    times.fetch_begins()
    assert times.taken_stall_fraction() == 0.5


@pytest.mark.parametrize("how", ["restart", "begins_anew"])
def test_the_first_wait_of_an_iterator_is_apart(times, clocks, how):
    run(times, clocks, [(1.0, 1.0, 0, 0)] * 3)
    getattr(times, how)()  # in the midst of the third step
    run(times, clocks, [(7.0, 1.0, 0, 0), (2.0, 2.0, 0, 0)])
    times.fetch_begins()
    assert times.start_wait == 7.0
    assert times.batches == {"restart": 1, "begins_anew": 4}[how]
    assert times.measured().wait_seconds == {"restart": 2.0, "begins_anew": 5 / 4}[how]
    assert times.taken_stall_fraction() == pytest.approx(12 / 18)


def test_a_restart_forgets(times, clocks):
    run(times, clocks, [(1.0, 1.0, 0, 0)] * 3)
    times.built(1.0, 1.0)
    times.restart()
    assert times.batches == 0
    assert times.measured() is None
