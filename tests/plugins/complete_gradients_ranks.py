"""Run on ranks by test_complete_gradients.py: hooks that clamp gradients, under DDP."""

import warnings
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_memkit import MemoryBudget
from tests.plugins.ranks import leave
from tests.plugins.test_complete_gradients import Net, batches, clamp
from tests.plugins.toys import trainer, weights


def fit(*callbacks: Any) -> torch.Tensor:
    torch.manual_seed(0)
    net = Net(clamp)
    ddp = trainer(
        *callbacks, max_epochs=1, max_steps=-1, devices=2, strategy="ddp_find_unused_parameters_true",
        use_distributed_sampler=False,
    )  # fmt: skip
    data: Any = batches()[ddp.global_rank :: 2]
    ddp.fit(net, DataLoader(data, batch_size=None))
    return weights(net)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    difference = float((fit(MemoryBudget("1GiB")) - fit()).abs().max())
    said = ""
    try:
        fit(MemoryBudget("1GiB", micro_batch_size=3, within="step"))
    except RuntimeError as error:
        said = str(error).replace("\n", " ")
    if torch.distributed.get_rank() == 0:
        print("differs", difference, flush=True)
        print("said", said, flush=True)
    leave()


if __name__ == "__main__":
    main()
