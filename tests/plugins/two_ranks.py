"""Run on ranks by test_two_ranks.py: trains taggers on two ranks and saves rank 0's weights."""

import sys
import warnings
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_memkit import MemoryBudget
from tests.plugins.ranks import leave
from tests.plugins.toys import (
    AbsentTagger,
    AveragedTagger,
    ContrastiveTagger,
    DetectorTagger,
    EpsilonTagger,
    GrowingTagger,
    MaskedTagger,
    OpaqueTagger,
    PenalizedTagger,
    RaggedTagger,
    ShardableTagger,
    SparseTagger,
    TightTagger,
    WeightedTagger,
    trainer,
)


class Sharded(ShardableTagger):
    """Each of its layers is sharded over the ranks (FSDP2)."""

    def configure_model(self) -> None:
        mesh: Any = self.device_mesh
        for part in (self.embedding, self.mix, self.head):
            if not isinstance(next(part.parameters()), DTensor):
                fully_shard(part, mesh=mesh["data_parallel"])


TAGGERS = {
    "plain": ShardableTagger,
    "weighted": WeightedTagger,
    "masked": MaskedTagger,
    "growing": GrowingTagger,
    "sparse": SparseTagger,
    "penalized": PenalizedTagger,
    "epsilon": EpsilonTagger,
    "detector": DetectorTagger,
    "averaged": AveragedTagger,
    "opaque": OpaqueTagger,
    "tight": TightTagger,
    "absent": AbsentTagger,
    "ragged": RaggedTagger,
    "contrastive": ContrastiveTagger,
}


STEPS, ROWS = 7, 8  # a step's rows are those of both ranks


def main(path: str, micro_batch_size: int, strategy: str, *losses: str) -> None:
    torch.set_num_threads(1)
    found = {loss: trained_on_two_ranks(TAGGERS[loss], micro_batch_size, strategy) for loss in losses}
    if torch.distributed.get_rank() == 0:
        torch.save(found, path)
    leave()


def trained_on_two_ranks(
    tagger: type[ShardableTagger], micro_batch_size: int, strategy: str
) -> dict[str, Any]:
    """Rank 0's weights and warnings, and by how much the ranks differ; rank 1 has the rows with more labels."""
    callbacks = [MemoryBudget("1GiB", micro_batch_size)] if micro_batch_size else []
    kind: Any = ModelParallelStrategy(2, 1) if strategy == "fsdp2" else "ddp"
    fitted = trainer(*callbacks, max_steps=STEPS, devices=2, strategy=kind, gradient_clip_val=0.5,
                     use_distributed_sampler=False)  # fmt: skip
    torch.manual_seed(0)
    kind_of_model = type("Model", (Sharded, tagger), {}) if strategy == "fsdp2" else tagger
    module = kind_of_model().double()
    rows, half = tagger.rows(STEPS * ROWS), ROWS // 2
    steps = [
        sorted(rows[i : i + ROWS], key=lambda row: int((row["labels"] != -100).sum()))
        for i in range(0, len(rows), ROWS)
    ]
    mine = [row for step in steps for row in step[half * fitted.global_rank :][:half]]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted.fit(module, DataLoader(mine, batch_size=half))  # pyright: ignore[reportArgumentType]
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in module.parameters()]
    weights = torch.cat([p.detach().flatten() for p in whole])
    gathered = [torch.empty_like(weights) for _ in range(2)]
    torch.distributed.all_gather(gathered, weights)
    spread = (gathered[0] - gathered[1]).abs().max()
    return {"weights": gathered[0], "spread": spread, "warned": [str(one.message) for one in caught]}


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
