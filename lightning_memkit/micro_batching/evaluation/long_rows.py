"""Make room for evaluation rows that don't fit, not even one: modules that take tokens one by one run in chunks."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_memkit.activations.chunks.finding import ChunkableModule, find_chunkable
from lightning_memkit.activations.chunks.forwards import ChunkedForwards, ChunkSizes
from lightning_memkit.distributed.collectives import collectives_issued
from lightning_memkit.micro_batching.evaluation.step import EvaluationStep
from lightning_memkit.micro_batching.evaluation.trials import EvaluationTrials
from lightning_memkit.micro_batching.parts.module_chunks import first_tokens, row_length
from lightning_memkit.micro_batching.ranks.alone import Ranks
from lightning_memkit.micro_batching.run import Run


class LongEvaluationRows:
    """The modules of evaluation steps whose tokens are independent, found where they are needed.

    Args:
        run: the loop, of which evaluation is a part.
        trials: runs micro-batches without a trace.

    Attributes:
        names: of the modules, by the hook in whose step they were looked for.
        tokens: of the longest row that was seen.
    """

    def __init__(self, run: Run, trials: EvaluationTrials) -> None:
        self.names: dict[str, tuple[str, ...]] = {}
        self.tokens = 0
        self._run, self._trials = run, trials
        self._sizes = ChunkSizes()
        self._forwards: dict[str, ChunkedForwards] = {}

    def find(self, step: EvaluationStep, ranks: Ranks) -> bool:
        """Find the modules by the step on the first tokens of a row; whether there are any.

        Costs that step with gradient, and small forwards and backwards of modules, once for each hook. Ranks that
        communicate in each forward must call it together.
        """
        self.tokens = int(ranks.largest_of([max(self.tokens, row_length(step.batch))])[0])
        if step.hook not in self.names:
            names = tuple(one.name for one in self._found(step, ranks))
            self.names[step.hook] = self._run.of_first_rank(lambda: names) if ranks.meets else names
        return bool(self.names[step.hook])

    @contextmanager
    def at(self, hook: str, tokens: int | None) -> Iterator[None]:
        """Run the hook's modules in chunks of at most so many tokens within; None leaves them as they are."""
        with ExitStack() as stack:
            if tokens is not None:
                for name in self.names.get(hook, ()):
                    # Those of training, which leave calls without gradient alone, may be there, too.
                    forwards = self._forwards.setdefault(name, self._new())
                    stack.callback(forwards.patch(self._run.module.get_submodule(name)))
            self._sizes.tokens = tokens
            stack.callback(setattr, self._sizes, "tokens", None)
            yield

    def _new(self) -> ChunkedForwards:
        return ChunkedForwards(self._sizes, refuses=False, mark="_memkit_chunked_in_evaluation")

    def _found(self, step: EvaluationStep, ranks: Ranks) -> list[ChunkableModule]:
        row = self._trials.rows_of(step.batch, 1)
        for part in (first_tokens(row), row):
            found: list[ChunkableModule] = []
            with suppress(Exception), self._trials.no_trace(step, part):
                found = find_chunkable(
                    self._run.module,
                    lambda part=part: self._with_gradient(step, part),
                    "tokens",
                    collectives_issued,
                )
            if ranks.any(bool(found)):  # the same number of steps on each
                return found
        return []

    @staticmethod
    def _with_gradient(step: EvaluationStep, part: Any) -> None:
        """What modules save tells what chunks would free, and shows itself with gradient only."""
        with torch.inference_mode(mode=False), torch.enable_grad():
            step.forward(tree_map_only(Tensor, _normal, step.transfer(part)))


def _normal(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.is_inference() else tensor
