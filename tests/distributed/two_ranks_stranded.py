"""Run on ranks by test_fsdp2.py: a sharded rank that can't catch up with its peers; what each rank was told."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard

from lightning_memkit.distributed.agreement import Agreement, StepOutcome
from lightning_memkit.distributed.catch_up import CannotCatchUpError, CatchUp


class Meeting(nn.Module):
    """A layer whose forward communicates by itself, as SyncBatchNorm does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.fails, self.meets = False, False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.fails:
            raise torch.OutOfMemoryError("made to fail")
        if self.meets:
            distributed.all_reduce(x.detach().mean())
        return self.last(x)


def main(folder: str, how: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    torch.manual_seed(0)
    net: Any = Meeting()
    for part in (net.first, net.last, net):
        fully_shard(part)
    agreement, catch_up = Agreement(), CatchUp(net)
    net.meets = how == "meets"
    x = torch.randn(3, 4)
    try:
        for step in range(2):
            net.fails = rank == 1 and (step == 1 or how == "first")
            failed = False
            try:
                with catch_up.part():
                    net(x).sum().backward()
            except torch.OutOfMemoryError:
                failed = True
            if failed:
                catch_up.finish()
            agreement.meet(StepOutcome.OUT_OF_MEMORY if failed else StepOutcome.DONE)
        told = "all is well"
    except (RuntimeError, CannotCatchUpError) as error:
        told = f"{type(error).__name__}: {error}"
    Path(folder, f"{rank}.txt").write_text(told)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
