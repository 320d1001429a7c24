"""Worker processes: their order, their errors, and what they tell."""

import gc
import multiprocessing
import os
import signal
import sys
import time
from typing import Any

import pytest
import torch
from torch.utils.data import get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from lightning_memkit.data.loading.worker_batches import BatchError, WorkerBatches, WorkerOptions, started_for

pytestmark = pytest.mark.filterwarnings("error")
JOBS = [(number, [number, number + 1]) for number in range(5, 12)]


def squares(job):
    return torch.tensor(job[1]) ** 2


def fails_on_eight(job):
    if job[0] == 8:
        raise KeyError("no such sample")
    return squares(job)


def killed_on_eight(job):
    if job[0] == 8:
        os.kill(os.getpid(), signal.SIGKILL)
    return squares(job)


def leaves_on_eight(job):
    if job[0] == 8:
        os._exit(3)
    return squares(job)


def leaves_quietly_on_eight(job):
    if job[0] == 8:
        os._exit(0)
    return squares(job)


def interrupted_on_eight(job):
    if job[0] == 8:
        raise KeyboardInterrupt
    return squares(job)


def exits_on_eight(job):
    if job[0] == 8:
        sys.exit()
    return squares(job)


def exits_with_three_on_eight(job):
    if job[0] == 8:
        sys.exit(3)
    return squares(job)


def stops_on_eight(job):
    if job[0] == 8:
        raise StopIteration
    return squares(job)


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("is_persistent", [False, True])
def test_batches_come_in_the_order_of_the_jobs_epoch_after_epoch(num_workers, is_persistent):
    workers = WorkerBatches(squares, WorkerOptions(num_workers=num_workers, is_persistent=is_persistent))
    for jobs in (JOBS, JOBS[::-1]):
        built = list(workers.batches(jobs))
        assert [one.batch.tolist() for one in built] == [[a * a, b * b] for _, (a, b) in jobs]
        assert all(one.seconds > 0 for one in built)


def test_persistent_workers_are_the_same_processes_and_others_are_not():
    for is_persistent in (True, False):
        workers = WorkerBatches(
            lambda _: os.getpid(), WorkerOptions(num_workers=1, is_persistent=is_persistent)
        )
        first, second = ({built.batch for built in workers.batches(JOBS)} for _ in range(2))
        assert (first == second) is is_persistent
        assert os.getpid() not in first


@pytest.mark.parametrize("num_workers", [1, 2])
def test_an_error_names_its_batch_and_shows_the_workers_traceback(num_workers):
    batches = WorkerBatches(fails_on_eight, WorkerOptions(num_workers=num_workers)).batches(JOBS)
    assert [next(batches).batch[0].item() for _ in range(3)] == [25, 36, 49]
    with pytest.raises(BatchError, match="Batch 8 of the epoch was not built") as raised:
        next(batches)
    assert "in fails_on_eight" in str(raised.value)
    assert "no such sample" in str(raised.value)
    assert isinstance(raised.value.__cause__, KeyError)


def test_without_workers_an_error_comes_as_it_is():
    with pytest.raises(KeyError, match="no such sample"):
        list(WorkerBatches(fails_on_eight, WorkerOptions()).batches(JOBS))


@pytest.fixture
def looks_often(monkeypatch):
    """Torch looks every 5 s whether its workers live."""
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.1,))


@pytest.mark.usefixtures("looks_often")
@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize(
    ("build", "ending"),
    [
        (killed_on_eight, "was killed by signal 9, SIGKILL"),
        (leaves_on_eight, "ended with exit code 3"),
        (exits_with_three_on_eight, "ended with exit code 3"),
        (leaves_quietly_on_eight, "left with exit code 0"),
        (interrupted_on_eight, "left with exit code 0, as by sys.exit() or a KeyboardInterrupt,"),
        (exits_on_eight, "left with exit code 0"),
    ],
)
@pytest.mark.parametrize("is_persistent", [False, True])
def test_a_dead_worker_is_named_with_its_ending_and_its_batch(build, ending, num_workers, is_persistent):
    workers = WorkerBatches(build, WorkerOptions(num_workers=num_workers, is_persistent=is_persistent))
    with pytest.raises(BatchError) as raised:
        list(workers.batches(JOBS))
    assert ending in str(raised.value)
    assert "while it built batch 8 of the epoch" in str(raised.value)
    assert f"Worker {1 if num_workers == 2 else 0} (process " in str(raised.value)


@pytest.mark.usefixtures("looks_often")
def test_a_worker_that_dies_strikes_nobody_but_who_waits_for_its_batch():
    may_die = torch.zeros(1).share_memory_()

    def dies_when_told(job):
        while job[0] == 6 and not may_die:
            time.sleep(0.001)
        return killed_on_eight((8, ())) if job[0] == 6 else squares(job)

    batches = WorkerBatches(dies_when_told, WorkerOptions(num_workers=1)).batches(JOBS)
    assert next(batches).batch.tolist() == [25, 36]
    may_die.fill_(1)
    while multiprocessing.active_children():  # a training step: torch's own watch raises in it
        time.sleep(0.001)
    with pytest.raises(BatchError, match="SIGKILL.* while it built batch 6 of the epoch"):
        next(batches)


@pytest.mark.usefixtures("looks_often")
def test_a_worker_that_dies_before_its_first_batch_says_so():
    def leave(_):
        os._exit(5)

    with pytest.raises(BatchError, match="ended with exit code 5 before its first batch"):
        list(WorkerBatches(squares, WorkerOptions(num_workers=1, on_start=leave)).batches(JOBS))


@pytest.mark.usefixtures("looks_often")
def test_a_worker_that_ends_between_two_batches_is_not_said_to_have_been_building_one():
    def told(_):
        return os.getpid()

    batches = WorkerBatches(told, WorkerOptions(num_workers=1, prefetch=1)).batches(endless_jobs())
    pid = next(batches).batch
    time.sleep(0.2)  # it has built what was asked for, and waits
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(BatchError, match=r"SIGKILL.* after batch \d+ of the epoch"):
        list(batches)


def endless_jobs():
    return [(number, ()) for number in range(100)]


@pytest.mark.parametrize("num_workers", [1, 3])
def test_an_error_at_a_workers_start_names_no_batch(num_workers):
    def fails(_):
        raise OSError("no such disk")

    workers = WorkerBatches(squares, WorkerOptions(num_workers=num_workers, on_start=fails))
    with pytest.raises(BatchError, match="Worker 0 could not start: its worker_init_fn raised") as raised:
        list(workers.batches(JOBS))
    assert "no such disk" in str(raised.value)
    assert "Batch" not in str(raised.value).split("\n")[0]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_epoch_does_not_end_where_a_data_set_raises_stop_iteration(num_workers):
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        list(WorkerBatches(stops_on_eight, WorkerOptions(num_workers=num_workers)).batches(JOBS))


def test_seconds_are_those_of_the_worker_and_of_its_processor():
    def sleeps(_):
        time.sleep(0.05)

    (built,) = WorkerBatches(sleeps, WorkerOptions(num_workers=1)).batches(JOBS[:1])
    assert built.seconds >= 0.05 > built.cpu_seconds


def test_global_random_numbers_are_left_alone_and_the_users_data_set_is_known():
    def told(_):
        info = get_worker_info()
        return info.dataset if info else None

    before = torch.get_rng_state()
    started = []
    options = WorkerOptions(num_workers=1, on_start=started_for("the user's", started.append))
    assert [built.batch for built in WorkerBatches(told, options).batches(JOBS[:2])] == ["the user's"] * 2
    assert torch.equal(torch.get_rng_state(), before)


def test_workers_end_where_the_batches_are_let_go():
    workers = WorkerBatches(lambda _: os.getpid(), WorkerOptions(num_workers=1))
    batches = workers.batches(JOBS)
    pid = next(batches).batch
    batches.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("receives_ahead", [False, True])
@pytest.mark.parametrize("is_persistent", [True, False])
def test_workers_in_a_reference_cycle_are_told_to_end(monkeypatch, is_persistent, receives_ahead):
    """The collector closed what tells them first, and waited 5 s for each worker."""
    end, open_queues = _MultiProcessingDataLoaderIter._shutdown_workers, []

    def noted(iterator):
        if iterator._workers is processes:
            open_queues.append(
                [bool(one._close and one._close.still_active()) for one in iterator._index_queues]
            )
        end(iterator)

    monkeypatch.setattr(_MultiProcessingDataLoaderIter, "_shutdown_workers", noted)
    options = WorkerOptions(num_workers=2, is_persistent=is_persistent, receives_ahead=receives_ahead)
    held: list[Any] = [WorkerBatches(squares, options)]
    held += [held, held[0].batches(JOBS)]
    next(held[2])
    processes = held[0]._iterator._workers
    del held
    gc.collect()
    assert open_queues[0] == [True, True]
    assert [process.exitcode for process in processes] == [0, 0]
