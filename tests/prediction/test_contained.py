import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_memkit.memory import limits
from lightning_memkit.plugins.planning.prediction import predict_memory
from lightning_memkit.prediction.contained import contained
from lightning_memkit.utilities.errors import PredictionError
from tests.testing.cuda_in_use import cuda_in_use

__all__ = ["cuda_in_use"]


def test_what_work_returns_comes_back_and_what_it_changes_does_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kept, tensor = [], torch.zeros(3)
    before = torch.get_rng_state()

    def work():
        kept.append(1)
        tensor.add_(1)
        torch.rand(7)
        with open("left", "w") as file:
            file.write("here")
        print("not seen")
        return {"sum": float(tensor.sum()), "pid": os.getpid()}

    found = contained(work)
    assert found["sum"] == 3
    assert found["pid"] != os.getpid()
    assert kept == []
    assert tensor.tolist() == [0, 0, 0]
    assert torch.equal(torch.get_rng_state(), before)
    assert list(tmp_path.iterdir()) == []


def test_an_error_is_raised_here_with_the_place_there():
    def wrong_value():
        raise ValueError("x=3 is odd")

    with pytest.raises(ValueError, match="x=3 is odd") as caught:
        contained(wrong_value)
    assert "in wrong_value" in str(caught.value.__cause__)


def test_an_error_that_cannot_be_pickled_keeps_its_words():
    class Local(Exception):
        pass

    def work():
        raise Local("only here")

    with pytest.raises(PredictionError, match="Local: only here"):
        contained(work)


def test_a_crash_is_named_and_leaves_this_process_alone():
    def crash():
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)

    with pytest.raises(PredictionError, match=r"SIGSEGV(.|\n)*last words"):
        contained(crash)
    with pytest.raises(PredictionError, match="status 3"):
        contained(lambda: os._exit(3))


def test_it_is_stopped_after_its_time():
    begin = time.monotonic()
    with pytest.raises(PredictionError, match="did not end within 1 s"):
        contained(lambda: time.sleep(60), timeout_s=1)
    assert time.monotonic() - begin < 30


ORPHANS = """
import os, sys, time
from lightning_memkit.prediction.contained import contained

def work():
    with open(sys.argv[1], "w") as file:
        file.write(str(os.getpid()))
    time.sleep(60)

contained(work)
"""


def test_it_ends_when_the_process_that_waits_is_killed(tmp_path):
    said = tmp_path / "pid"
    waits = subprocess.Popen([sys.executable, "-c", ORPHANS, str(said)])
    ends = time.monotonic() + 60
    while not (said.exists() and said.read_text()) and time.monotonic() < ends:
        time.sleep(0.05)
    pid = int(said.read_text())
    waits.kill()
    waits.wait()
    while time.monotonic() < ends:
        status = Path(f"/proc/{pid}/stat")
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("the copy goes on")


def test_it_draws_the_numbers_that_the_original_would():
    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    first, again = contained(draw), contained(draw)
    assert first == again == draw()


def test_it_can_be_nested():
    assert contained(lambda: contained(lambda: 1) + 1) == 2


def test_torch_finds_no_accelerator_that_the_original_has_used(cuda_in_use):
    def work():
        with isolate_rng():  # Lightning's, in each of its stages
            torch.manual_seed(3)
            torch.cuda.synchronize()
            return torch.cuda.is_available(), torch.cuda.device_count(), torch.accelerator.is_available()

    assert contained(work) == (False, 0, False)
    assert torch.cuda.is_available()


def test_a_cap_of_the_original_s_can_be_taken_back(cuda_in_use):
    """A forecast takes the run's plugins away in its fork: all of MemoryBudget's failed on the first card."""
    undo = limits.hard_cap(torch.device("cuda"), 1 << 30)
    contained(undo)
    with pytest.raises(RuntimeError, match="re-initialize"):  # the double does raise where it is asked
        contained(lambda: torch.cuda.mem_get_info())


def test_a_training_is_predicted_after_the_original_has_used_cuda(cuda_in_use):
    """It raised "Cannot re-initialize CUDA in forked subprocess": every plan, every forecast."""
    found = predict_memory(BoringModel(), torch.randn(4, 32))
    assert found.peak_bytes > 0
    with pytest.raises(RuntimeError, match="re-initialize"):  # the double does raise where it is asked
        contained(torch.cuda.current_device)
