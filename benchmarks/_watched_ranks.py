"""Start two gloo ranks, and watch whether they get on."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HANG_SECONDS = 60
START_SECONDS = 180


def watched(module: str, arguments: str, results: Path) -> bool:
    """Run a module's `main` on two ranks to its end; whether they were stopped since nothing went on.

    Args:
        module: its name.
        arguments: its one argument.
        results: a file to which the ranks append a line each time that they get on.
    """
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone",
               "-m", module, arguments]  # fmt: skip
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, cwd=Path(__file__).parents[1], start_new_session=True, stdout=output, stderr=output,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        size, limit, waited = results.stat().st_size, START_SECONDS, 0.0
        last = time.monotonic()
        while process.poll() is None:
            time.sleep(0.1)
            # Where this process did not get to run either, the whole machine stood still, and not the ranks.
            waited, last = waited + min(1.0, time.monotonic() - last), time.monotonic()
            if results.stat().st_size != size:
                size, waited, limit = results.stat().st_size, 0.0, HANG_SECONDS
            if waited > limit:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return True
    return False
