"""Forks run no destructor of what they have inherited: it may wait for threads that only the original has."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_memkit.data.loading.worker_batches import WorkerBatches, WorkerOptions
from lightning_memkit.data.sources import tokenising
from lightning_memkit.data.sources.records import Encoder
from lightning_memkit.prediction.contained import contained
from lightning_memkit.utilities.forks import starting
from tests.data.test_sources import read


class Finalised:
    """Part of a cycle, so that only the collector ends it; writes down in which process that was."""

    def __init__(self, told: Path) -> None:
        self.told, self.itself = told, self

    def __del__(self) -> None:
        with self.told.open("a") as file:
            print(os.getpid(), file=file)


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Path]:
    """Where garbage of this process tells who has ended it."""
    gc.collect()
    gc.disable()
    path = tmp_path / "told"
    Finalised(path)
    gc.enable()
    yield path
    gc.collect()
    assert path.read_text().split() == [str(os.getpid())]  # it is still this process's own


def collected(*_: Any) -> int:
    """What a fork finds when it collects; garbage that it makes itself is its own."""
    assert gc.isenabled()
    own: list[Any] = []
    own.append(own)
    del own
    return gc.collect()


def test_a_prediction(told: Path) -> None:
    assert contained(collected, timeout_s=60) > 0


def test_the_workers_of_a_loader(told: Path) -> None:
    batches = WorkerBatches(collected, WorkerOptions(num_workers=2))
    assert all(built.batch > 0 for built in batches.batches([(number, None) for number in range(4)]))


ENCODE = tokenising._encode


def collecting(encoder: Encoder, job: Any) -> Any:
    gc.collect()
    return ENCODE(encoder, job)


def test_processes_that_tokenise(told: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"}\n')
    monkeypatch.setattr(tokenising, "_ALONE_SECONDS", -1.0)
    monkeypatch.setattr(tokenising, "_encode", collecting)
    gc.disable()  # else it is no garbage any more when the processes start
    try:
        assert read(path, processes=2).documents == 2
    finally:
        gc.enable()


def test_starts_within_starts_and_beside_them_leave_the_collector_as_it_was() -> None:
    with starting(), starting():
        assert not gc.isenabled()
    assert gc.isenabled()
    first, second = starting(), starting()  # of two threads
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_a_process_that_holds_its_collector_has_it_held_afterwards(told: Path) -> None:
    gc.disable()
    try:
        assert contained(gc.isenabled, timeout_s=60) is False
        assert not gc.isenabled()
    finally:
        gc.enable()
