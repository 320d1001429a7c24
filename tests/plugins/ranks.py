"""What the scripts that run on several ranks share."""

import os
import sys

import torch


def leave() -> None:
    """End a rank's process, successfully, once all ranks are here."""
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads now and then abort a process that exits by the usual way
