"""Run on ranks by test_agreement.py: rank 1 ends within a step; rank 0 writes what it was told."""

import os
import sys
from pathlib import Path

import torch
from torch import distributed

from lightning_memkit.distributed.agreement import Agreement


def main(path: str, how: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    agreement = Agreement(3)
    agreement.total([1])  # all are here
    if distributed.get_rank() == 1:
        try:
            raise KeyError("labels")
        except KeyError:
            if how == "says so":
                agreement.end()
            os._exit(0)
    try:
        if how == "is not listened to":
            agreement.end()  # rank 1 is gone, or not there: this rank's own error is what counts
            told = "nothing"
        else:
            agreement.meet(counts=[1, 2, 3])
            told = "all is well"
    except RuntimeError as error:
        told = f"{type(error).__name__}: {error}"
    Path(path).write_text(told)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
