"""Run on ranks by test_two_cards.py: MemoryBudget on two cards, one of which runs out of memory alone.

Each launch has its cases: those of `BOTH_BACKENDS` offload their shards, and so need a group with gloo beside NCCL.
"""

import sys
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_memkit import FSDP2Strategy, MemoryBudget
from lightning_memkit.distributed.collectives import collectives_issued
from tests.gpu.card import accelerator, on_cpu
from tests.gpu.models import Decoder, Language, tokens
from tests.plugins.ranks import leave
from tests.plugins.toys import trainer

BUDGET, ROWS, STEPS, FAULTY_STEP = 1 << 30, 8, 6, 3
ONE_BACKEND = ("ddp", "ddp, rank 1 runs out", "fsdp2", "fsdp2, rank 1 runs out")
BOTH_BACKENDS = ("offloaded fsdp2", "offloaded fsdp2, rank 1 runs out")
CLIP = 0.5  # the norm of what is offloaded is reduced in host memory


class Uneven(Language):
    """In float64; rank 1's first micro-batch of some step is too much for it. A mean over labels, not over rows."""

    faulty = False

    def __init__(self) -> None:
        super().__init__(lambda: Decoder(64, 32, 3, 2).double())

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if self.faulty and batch_idx == FAULTY_STEP and len(batch["ids"]) == ROWS // 2:
            if self.trainer.global_rank == 1:
                if on_cpu():
                    raise torch.OutOfMemoryError("as a card says it")
                torch.empty(BUDGET + 1, dtype=torch.uint8, device=self.device)
        logits = self.network(batch["ids"])
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def rows() -> list[dict[str, Tensor]]:
    """Of each batch the second half, which is rank 1's, has far fewer labels."""
    ids = tokens(ROWS * STEPS, 32)
    labels = ids.clone()
    for number in range(len(ids)):
        labels[number, : 28 if number % ROWS >= ROWS // 2 else 3] = -100
    return [{"ids": i, "labels": one} for i, one in zip(ids, labels, strict=True)]


class Whole(Callback):
    """All weights at the end, whatever holds them; and the collectives of each step, None if not counted."""

    def __init__(self) -> None:
        self.issued: list[int | None] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.before = collectives_issued()

    def on_train_batch_end(self, *_: Any) -> None:
        after = collectives_issued()
        self.issued.append(None if after is None or self.before is None else after - self.before)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        parts = [p.full_tensor() if isinstance(p, DTensor) else p for p in pl_module.parameters()]
        self.weights = torch.cat([p.detach().flatten() for p in parts]).cpu()


STRATEGIES: dict[str, Any] = {
    "d": lambda: "ddp",
    "f": FSDP2Strategy,
    "o": lambda: FSDP2Strategy(cpu_offload=True),
}


def trained(case: str = "", ranks: int = 1) -> tuple[Tensor, int, list[int | None]]:
    """The weights, how many steps were retried, and the collectives of each step."""
    torch.manual_seed(0)
    whole, module = Whole(), Uneven()
    module.faulty = case.endswith("runs out")
    budget = MemoryBudget(BUDGET, micro_batch_size=ROWS // ranks)
    strategy: Any = STRATEGIES[case[0]]() if case else "auto"
    fitted = trainer(
        *([budget] if case else []),
        whole,
        max_steps=STEPS,
        gradient_clip_val=CLIP,
        accelerator=accelerator(),
        devices=ranks,
        strategy=strategy,
        use_distributed_sampler=False,
    )
    each = ROWS // ranks
    begin = fitted.global_rank * each
    mine: Any = [row for number, row in enumerate(rows()) if begin <= number % ROWS < begin + each]
    fitted.fit(module, DataLoader(mine, batch_size=each))
    return whole.weights, budget.retries, whole.issued


def main(path: str, *cases: str) -> None:
    found = {}
    for case in cases:
        own: list[Any] = [None, None]
        mine = trained(case, 2)
        torch.distributed.all_gather_object(own, mine)
        weights, retries, issued = zip(*own, strict=True)
        found[case] = {
            "weights": weights[0],
            "spread": float((weights[0] - weights[1]).abs().max()),
            "retries": retries,
            "issued": issued,
            "backends": torch.distributed.get_backend_config(),
        }
    if torch.distributed.get_rank() == 0:
        torch.save(found, path)
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
