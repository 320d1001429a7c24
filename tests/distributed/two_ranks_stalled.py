"""Run on ranks by test_agreement.py: groups and their timeouts, then a rank that does not come to a meeting."""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from lightning_memkit.distributed.agreement import Agreement
from lightning_memkit.distributed.own_group import own_group
from lightning_memkit.distributed.timeouts import give_timeout

SECONDS = 6.0  # a busy machine may hold a rank up for some seconds by itself


def main(path: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=SECONDS))
    rank = distributed.get_rank()
    agreement, mesh = Agreement(), init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    give_timeout(mesh)
    groups = [agreement.group, own_group(), *mesh.get_all_groups()]
    set_to = [_backend(group).options._timeout.total_seconds() for group in groups]
    agreement.meet()
    began = time.monotonic()
    if rank == 1:  # it comes to no meeting
        while not Path(path).exists() and time.monotonic() < began + 40 * SECONDS:
            time.sleep(0.05)
        os._exit(0)
    began, told = time.monotonic(), ""
    try:
        agreement.meet()
    except RuntimeError as error:
        told = f"{type(error).__name__}: {error}"
    waited = time.monotonic() - began
    agreement.end()
    ended = time.monotonic() - began
    torch.save({"timeouts": set_to, "told": told, "waited": waited, "ended": ended}, path)
    os._exit(0)


def _backend(group: Any) -> Any:
    return group._get_backend(torch.device("cpu"))


if __name__ == "__main__":
    main(*sys.argv[1:])
