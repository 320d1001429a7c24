"""What torch's budget for compiled functions recomputes, beside the least that fits its bytes.

torch decides what a compiled function keeps by a knapsack: of its values that may be made again, keep those that take
the longest, in at most so many bytes. Its default solver rounds bytes to a ten-thousandth of the budget; an integer
solver (HiGHS, by `torch._functorch`'s own option `"ilp"`) gives the exact answer to the same question.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks._activation_models import Case
from lightning_memkit import checkpoint_modules
from lightning_memkit.prediction.replaced import replaced


@dataclass(frozen=True, kw_only=True)
class Recomputed:
    """The cost of what a model's functions recompute, in torch's unit (FLOPs), over that of all that they might.

    Attributes:
        ours: as torch chose.
        least: of any choice in the same bytes.
        functions: how many had a choice.
    """

    ours: float
    least: float
    functions: int

    @property
    def over_pct(self) -> float:
        """How much more than the least is recomputed, in percent."""
        return 100 * (self.ours / self.least - 1) if self.least else 0.0 if not self.ours else float("inf")


def recomputed(case: Case, policy: str) -> Recomputed:
    """What the blocks of a model recompute under a policy `compile:x`."""
    from torch._functorch import partitioners
    from torch._functorch._activation_checkpointing.knapsack import ilp_knapsack
    from torch._inductor import config

    asked: list[tuple[float, float, float]] = []
    plain = partitioners.dp_knapsack

    def noted(memory: Sequence[float], runtimes: Sequence[float], most: float) -> Any:
        found = plain(memory, runtimes, most)  # pyright: ignore[reportArgumentType]
        exact = ilp_knapsack(memory, runtimes, most)  # pyright: ignore[reportArgumentType]
        ours, least = (sum(runtimes) - sum(runtimes[index] for index in one[1]) for one in (found, exact))
        asked.append((sum(runtimes), ours, least))
        return found

    torch.compiler.reset()
    with replaced(partitioners, dp_knapsack=noted), config.patch(force_disable_caches=True):
        model = case.build()
        checkpoint_modules(model, policy)
        case.loss(model).backward()
    torch.compiler.reset()
    if not asked:
        raise RuntimeError(
            f"torch chose nothing for {policy}: its partitioner asks another solver, or kept everything."
        )
    whole, ours, least = (sum(one[place] for one in asked) for place in range(3))
    return Recomputed(ours=ours / whole, least=least / whole, functions=len(asked))
