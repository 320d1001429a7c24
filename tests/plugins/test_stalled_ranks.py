"""A rank that stands still: the others end by the strategy's timeout, whatever they wait for."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

TIMEOUT_SECONDS = 8.0  # a busy machine may hold a rank up for some seconds by itself
LONGER_SECONDS = 16.0  # where more ranks start
MOST = (
    15  # timeouts until the others have left `fit`: below torch's 30 minutes, above what a slow machine adds
)
SLOW_SECONDS = 20.0  # of the slow cases, which show the promise itself
PROMISED = 1.5  # timeouts
START_SECONDS = 120  # until the rank stops, on a busy machine


def stalled(folder: Path, **words: Any) -> list[dict[str, Any]]:
    """Run ranks of which one stops; what each of the others said, and after how many timeouts it ended."""
    words = {"ranks": 2, "budget": True, **words}
    words.setdefault("timeout", TIMEOUT_SECONDS if words["ranks"] == 2 else LONGER_SECONDS)
    words.setdefault("stops", words["ranks"] - 1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = []
    for rank in range(words["ranks"]):
        given = {
            **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": "0", "LOCAL_RANK": str(rank),
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "tests.plugins.ranks_stalled",
            str(folder),
            json.dumps(words),
        ]
        with (folder / f"{rank}.log").open("w") as log:
            processes.append(
                subprocess.Popen(command, cwd=Path(__file__).parents[2], env=given, stdout=log, stderr=log)
            )
    others = [rank for rank in range(words["ranks"]) if rank != words["stops"]]
    try:
        stopped = _wait_for(folder / "stopped", START_SECONDS, folder)
        limit = stopped + MOST * words["timeout"]
        for rank in others:
            processes[rank].wait(max(limit - time.monotonic(), 0.1))
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait()
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in others]
    return [{**one, "waited": (one["ended"] - stopped) / words["timeout"]} for one in found]


def _wait_for(path: Path, seconds: float, folder: Path) -> float:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if path.is_file() and path.read_text():
            return float(path.read_text())
        if early := [one.read_text() for one in folder.glob("*.json")]:
            raise AssertionError(f"A rank ended before one was stopped: {early}")
        time.sleep(0.05)
    raise AssertionError(
        "no rank stopped: " + "".join(log.read_text()[-2000:] for log in folder.glob("*.log"))
    )


SAMPLE = [{"strategy": "ddp", "place": "sizing"}]
SLOW = [
    {"strategy": strategy, "place": place, "ranks": ranks}
    for strategy in ("ddp", "zero1", "fsdp2")
    for place in ("sizing", "training", "evaluation", "saving", "recovery-own", "recovery-peers")
    for ranks in (2, 3)
    if (strategy, place, ranks) != ("ddp", "sizing", 2)
]
SLOW += [{"strategy": "fsdp2", "place": "saving-thread", "ranks": ranks} for ranks in (2, 3)]
SLOW += [{"strategy": strategy, "place": "training", "stops": 0} for strategy in ("ddp", "fsdp2")]
SLOW += [{"strategy": "fsdp2", "place": "saving-thread", "budget": False}]


@pytest.mark.parametrize("words", SAMPLE, ids=str)
@pytest.mark.long
def test_the_others_end_by_the_strategys_timeout(tmp_path, words):
    for one in stalled(tmp_path, **words):
        assert one["told"] != "nothing"
        assert one["waited"] <= MOST, one


@pytest.mark.slow
@pytest.mark.parametrize("words", SAMPLE + SLOW, ids=str)
def test_the_others_end_within_one_and_a_half_timeouts(tmp_path, words):
    for one in stalled(tmp_path, **words, timeout=SLOW_SECONDS):
        assert one["told"] != "nothing"
        assert one["waited"] <= PROMISED, one
