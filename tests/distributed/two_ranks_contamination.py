"""Run on ranks by plugins/test_contamination.py: rank 0's rows hold documents, rank 1's one document each."""

import sys
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from examples.pretrain_causal_lm.model import CausalLM
from lightning_memkit.attention.contamination import ContaminationError
from lightning_memkit.plugins.callbacks.contamination import ContaminationProbe
from tests.plugins.ranks import leave
from tests.plugins.test_contamination import Batches, leaking, model
from tests.plugins.toys import trainer


class Sharded(CausalLM):
    """Each of its layers is sharded over the ranks (FSDP2)."""

    def configure_model(self) -> None:
        mesh: Any = self.device_mesh
        for block in self.blocks:
            fully_shard(block, mesh=mesh["data_parallel"])


def main(path: str, strategy: str) -> None:
    torch.set_num_threads(1)
    ends: dict[str, str] = {}
    for name, options in (("clean", {}), ("leak", {"attention": leaking})):
        for run in ("fit", "validate"):
            kinds: dict[str, Any] = {"ddp": "ddp", "fsdp2": ModelParallelStrategy(2, 1)}
            one = trainer(ContaminationProbe(), max_steps=2, devices=2, strategy=kinds[strategy])
            module = model(**options, kind=Sharded if strategy == "fsdp2" else CausalLM)
            batches = Batches(documents=0 if one.global_rank else 4)
            try:
                getattr(one, run)(module, batches)
                ends[f"{run}, {name}"] = f"{one.global_step} steps"
            except ContaminationError as error:
                ends[f"{run}, {name}"] = str(error)
    gathered: list[Any] = [None, None]
    torch.distributed.all_gather_object(gathered, ends)
    torch.save({"ends": gathered}, path)
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
