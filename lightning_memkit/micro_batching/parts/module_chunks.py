"""Modules in chunks of rows, for batches that can't be split, and of tokens, for rows that don't fit."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_memkit.activations.chunks.axes import AxisName
from lightning_memkit.activations.chunks.finding import ChunkableModule, find_chunkable
from lightning_memkit.activations.chunks.forwards import ChunkedForwards, ChunkSizes
from lightning_memkit.activations.chunks.units import unit_numbers
from lightning_memkit.distributed.collectives import collectives_issued
from lightning_memkit.memory.out_of_memory import is_out_of_memory
from lightning_memkit.micro_batching import SplitError, batch_size, split_batch
from lightning_memkit.micro_batching.graph.loss_head import Edges, head_of
from lightning_memkit.micro_batching.ranks.agreement import any_rank, largest_of_ranks
from lightning_memkit.micro_batching.run import Run, Step
from lightning_memkit.utilities.patching import Undo

if TYPE_CHECKING:
    from lightning_memkit.micro_batching.proof.trials import Trials

# Of the batch, in the step that finds the modules; more where it fails on so few.
_ASKED: dict[AxisName, tuple[int, ...]] = {"rows": (8, 32, 2), "tokens": (1, 2, 8)}
_ASKED_TOKENS = 256


class ModuleChunks:
    """The modules of a run whose rows, or tokens, are independent, found where they are needed.

    Args:
        run: the training loop.

    Attributes:
        names: of the modules that run in chunks of rows, and of tokens; an axis is missing until they were looked for.
        tokens: the tokens of the longest row that was seen.
        fails: why modules that were found don't run in chunks; empty if they do, or none were.
        heads: the functions next to the loss where they do, see `head_of`: a loss that is proven is the same then.
    """

    def __init__(self, run: Run) -> None:
        self.names: dict[AxisName, tuple[str, ...]] = {}
        self.tokens = 0
        self.fails = ""
        self.heads: Edges = frozenset()
        self._run = run
        self._sizes: dict[str, ChunkSizes] = {}
        self._undo: list[Undo] = []
        self._rows: int | None = None
        self._tokens: int | None = None

    def __str__(self) -> str:
        said = []
        sizes: tuple[tuple[AxisName, int | None], ...] = (("rows", self._rows), ("tokens", self._tokens))
        for axis, size in sizes:
            names = self.names.get(axis, ())
            if size is not None and names:
                shown = ", ".join(names[:3])
                shown = f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
                said.append(f"{shown} in chunks of {size} {axis if size > 1 else axis.removesuffix('s')}")
        return ", ".join(said) or "no module in chunks"

    def find(self, step: Step, trials: "Trials", axis: AxisName) -> bool:
        """Find the modules by trials on a few rows, and patch them; whether there are any. All ranks must call it."""
        if axis not in self.names:
            found, part = self._found(step, trials, axis)
            self.names[axis] = names = self._run.of_first_rank(lambda: tuple(one.name for one in found))
            longest = max((one.count for one in found), default=1)
            if axis == "tokens":
                self.tokens = int(largest_of_ranks(self._run, [max(longest, row_length(step.batch))])[0])
            self._patch(names)
            chunk = (1, self._tokens) if axis == "rows" else (self._rows, -(-longest // 2))
            if names and not self._runs(step, trials, part, chunk):
                shown = ", ".join(names[:3])
                self.fails = f" The step fails where {shown} run in chunks: is an input written to later?"
                self.names[axis] = ()
        return bool(self.names[axis])

    def _runs(self, step: Step, trials: "Trials", part: object, chunk: tuple[int | None, int | None]) -> bool:
        """Whether the step runs in chunks, if it runs without: inputs that are written to later are needed once more.

        The first call in chunks asks each module once more, and DDP makes its buckets anew in the second forward after
        a backward: here, and not within a trial that measures.
        """
        before, failed = (self._rows, self._tokens), []

        def look(loss: Tensor) -> Tensor:
            self.heads |= head_of(loss)
            return loss

        for sizes in (before, chunk, chunk):
            self.resize(*sizes)
            failed.append(True)
            with suppress(Exception), trials.no_trace(step, part, seen=True):
                trials.run(step, part, look=look)
                failed[-1] = False
        self.resize(*before)
        return not any_rank(self._run, any(failed[1:]) and not failed[0])

    def resize(self, rows: int | None, tokens: int | None) -> None:
        """Put at most so many rows, and so many tokens of each, into a chunk; None for all."""
        self._rows, self._tokens = rows, tokens
        for name, sizes in self._sizes.items():
            sizes.rows = rows if name in self.names.get("rows", ()) else None
            sizes.tokens = tokens if name in self.names.get("tokens", ()) else None

    def close(self) -> None:
        """Put the modules' own forwards back."""
        while self._undo:
            self._undo.pop()()
        self.names = {}

    def _patch(self, names: Sequence[str]) -> None:
        """Let modules run in chunks; as they are in evaluation, where there is no backward to recompute in."""
        units = unit_numbers(self._run.module)
        for name in (one for one in names if one not in self._sizes):
            sizes, module = ChunkSizes(), self._run.module.get_submodule(name)
            self._sizes[name] = sizes
            unit = units.get(module)
            forwards = ChunkedForwards(sizes, refuses=False, only_with_gradient=True, unit=unit)
            self._undo.append(forwards.patch(module))

    def _found(self, step: Step, trials: "Trials", axis: AxisName) -> tuple[list[ChunkableModule], Any]:
        """The modules, and the part of the batch on which they were found."""
        part = step.batch
        for part in parts_asked(step.batch, axis):
            found: list[ChunkableModule] = []
            meets = self._run.meets_in_every_micro_batch
            asked = partial(trials.run, step, part) if meets else partial(self._run_part, step, part)
            with suppress(Exception), trials.no_trace(step, part, seen=True):
                found = find_chunkable(self._run.module, asked, axis, collectives_issued, has_backward=meets)
            if any_rank(self._run, bool(found)):  # the same number of steps on each
                return found, part
        return [], part

    def _run_part(self, step: Step, part: object) -> None:
        """The step on a part of the batch. Where it fails, the modules that ran before are known."""
        try:
            step.forward(self._run.transfer(part))
        except Exception as error:
            if is_out_of_memory(error):
                raise


def parts_asked(batch: Any, axis: AxisName) -> Iterator[Any]:
    """What the step is run on to find modules, one after the other until there are any; as many on each rank."""
    total = batch_size(batch)
    for rows in _ASKED[axis]:
        part = batch
        with suppress(SplitError):  # the user has a split of their own
            part = batch if rows >= total else split_batch(batch, [rows, total - rows])[0]
        if axis == "tokens":  # where the step takes fewer tokens, it needs less memory
            yield first_tokens(part)
        yield part


def row_length(batch: Any) -> int:
    """The length of the second dimension of the first tensor that has one."""
    return next(
        (leaf.shape[1] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim > 1), 1
    )


def first_tokens(batch: Any) -> Any:
    """A batch with the first tokens of its rows, by the length of the first tensor's second dimension."""
    length = row_length(batch)

    def cut(tensor: Tensor) -> Tensor:
        for dim in range(1, tensor.ndim):
            if tensor.shape[dim] == length:
                tensor = tensor.narrow(dim, 0, min(length, _ASKED_TOKENS))
        return tensor.contiguous()

    return batch if length <= _ASKED_TOKENS else tree_map_only(Tensor, cut, batch)
