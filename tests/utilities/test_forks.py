"""Forks run no destructor of what they have inherited: it may wait for threads that only the original has."""

import gc
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memkit.data.loading.worker_batches import WorkerBatches, WorkerOptions
from lightning_memkit.data.sources import tokenising
from lightning_memkit.data.sources.records import Encoder
from lightning_memkit.prediction.contained import contained
from lightning_memkit.utilities.forks import _of_no_device, hide_accelerators, starting
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


def test_threads_fork_in_turn() -> None:
    """Libraries refuse a fork while another one begins; and a collector that is off for it stays off for its own."""
    inside: list[int] = []

    def begin(_: int) -> bool:
        with starting() as collects:
            inside.append(1)
            time.sleep(0.01)
            alone = len(inside) == 1 and collects
            inside.pop()
        return alone

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(begin, range(8)))
    assert gc.isenabled()
    assert contained(lambda: contained(lambda: 7, timeout_s=60), timeout_s=60) == 7  # a fork's own forks


@pytest.mark.parametrize("hidden", ["cuda", "xpu"])
def test_a_custom_backend_is_seen_in_forks_that_find_no_accelerator(
    hidden: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is registered in the fork, of a torch that was built for another one."""
    there = [hidden]
    for name in ("is_available", "device_count", "current_accelerator"):
        monkeypatch.setattr(torch.accelerator, name, getattr(torch.accelerator, name))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(there[0]))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    for module in (torch.cuda, torch.xpu):
        for name in _of_no_device().keys() & vars(module).keys():
            monkeypatch.setattr(module, name, getattr(module, name))
    hide_accelerators()
    accelerator = torch.accelerator
    assert (accelerator.current_accelerator(), accelerator.is_available(), accelerator.device_count()) == (
        None, False, 0,
    )  # fmt: skip
    there[0] = "cpu"  # stands for the custom one
    assert (accelerator.current_accelerator(), accelerator.is_available(), accelerator.device_count()) == (
        torch.device("cpu"), True, 1,
    )  # fmt: skip


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
