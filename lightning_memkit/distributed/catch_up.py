"""Let a rank that failed within FSDP2's forward or backward issue the collectives that its peers still wait for.

Sharded ranks meet in every layer: where one fails, the others wait in the next all-gather or reduce-scatter. What a
part issues is the same each time and on all ranks, so it is written down once, from a part that went through. A rank
that fails after k collectives resets its engine and issues the others by themselves, without a forward: its own
shards in all-gathers, zeros in reduce-scatters. Its peers finish their part, and all throw it away together. Where no
part went through yet, it runs a smallest part instead, whose first k collectives are left out.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memkit.distributed.collectives import collectives_issued
from lightning_memkit.distributed.fsdp2 import parameter_groups, reset_fsdp, sharded_states, why_no_reset
from lightning_memkit.memory.out_of_memory import is_out_of_memory

_INNER = (
    "DefaultAllGather",
    "DefaultReduceScatter",
    "ProcessGroupAllocAllGather",
    "ProcessGroupAllocReduceScatter",
)


@dataclass(frozen=True)
class _Issued:
    """One collective of a part."""

    kind: str
    group: int
    numel: int
    dtype: torch.dtype
    operation: Any = field(default=None, compare=False)


class CannotCatchUpError(Exception):
    """This rank can't join the collectives its peers wait in: it has to end, and they with it.

    Not a RuntimeError: those that name memory are retried.
    """


def why_no_catch_up(module: nn.Module) -> str:
    """Why a rank can't catch up with its peers under FSDP2; empty where it can."""
    reason = why_no_reset(module)
    if reason:
        return reason
    for state in sharded_states(module):
        groups = parameter_groups([state])
        if len(groups) > 1:
            return (
                "a module's parameters are sharded over several meshes, whose collectives can't be replaced"
            )
        for group in groups:
            if hasattr(group.mesh_info, "replicate_process_group"):
                return "parameters are replicated over a mesh dimension too (HSDP), whose all-reduce can't be repeated"
            if group._use_post_forward_mesh:
                return "reshard_after_forward is a number: parameters are gathered over two groups"
            if group._all_reduce_hook is not None:
                return "set_all_reduce_hook communicates in ways that can't be repeated"
            for comm in (group._all_gather_comm, group._reduce_scatter_comm):
                if type(comm).__name__ not in _INNER and not isinstance(comm, _Recorded):
                    return f"{type(comm).__name__} replaces FSDP2's collectives"
    return ""


class CatchUp:
    """Writes down the collectives of parts, and issues what is missing of one that was broken off.

    It costs a Python call a collective. Within a `part` that does not count, what this rank adds to the gradients is
    exactly zero, even where its loss is not a number.

    Args:
        module: holds the modules that `fully_shard` was applied to; `why_no_catch_up` must be empty.
    """

    def __init__(self, module: nn.Module) -> None:
        self.foreign = False  # whether parts issue collectives that are not FSDP2's
        self._module = module
        self._states = [state for state in sharded_states(module) if parameter_groups([state])]
        self._groups = parameter_groups(self._states)
        self._tapes: dict[Any, list[tuple[_Issued, ...]]] = {}
        self._issued: list[_Issued] = []
        self._key: Any = None
        self._recording = self._silent = False
        self._left_out: list[_Issued] = []  # what a rehearsal is not to issue again
        self._within = False  # a collective is being issued: nobody knows whether it was
        for index, (state, group) in enumerate(zip(self._states, self._groups, strict=True)):
            state._modules[0].set_custom_all_gather(_AllGather(self, index, group._all_gather_comm))
            state._modules[0].set_custom_reduce_scatter(
                _ReduceScatter(self, index, group._reduce_scatter_comm)
            )

    def close(self) -> None:
        """Give FSDP2 its own collectives back."""
        for state, group in zip(self._states, self._groups, strict=True):
            state._modules[0].set_custom_all_gather(group._all_gather_comm.inner)
            state._modules[0].set_custom_reduce_scatter(group._reduce_scatter_comm.inner)

    def begin(self) -> None:
        """Before a step: begin sharded, as long as no part has shown what it issues from there."""
        if not any(not any(unsharded) for _, unsharded in self._tapes):
            for state, group in zip(self._states, self._groups, strict=True):
                if group.is_unsharded:  # since validation
                    state._modules[0].reshard()

    @contextmanager
    def part(self, *, counts: bool = True, kind: str = "train") -> Iterator[None]:
        """Encloses one part: its transfer, forward and backward; `kind` tells parts of other passes apart."""
        self._issued, self._within = [], False
        self._key = (kind, tuple(bool(group.is_unsharded) for group in self._groups))
        self._recording, self._silent = True, not counts
        before = collectives_issued()
        try:
            yield
        finally:
            self._recording = self._silent = False
        after = collectives_issued()
        if before is None or after is None or after - before != len(self._issued):
            self.foreign = True
        self._remember()

    def _remember(self) -> None:
        tape, known = tuple(self._issued), self._tapes.setdefault(self._key, [])
        if tape not in known:
            known.append(tape)

    def reset(self) -> None:
        """Bring FSDP2's engine back to between two steps."""
        reset_fsdp(self._module)

    def finish(self, smallest_part: Callable[[], object] | None = None) -> None:
        """Issue what is missing of the part that was just broken off; call it once the part's tensors are freed.

        Needs memory for the largest layer's parameters or gradients, and no activations.

        Args:
            smallest_part: forward and backward of one row, for where no part like it went through before.

        Raises:
            CannotCatchUpError: what the peers wait for is unknown, or needs more memory than there is.
        """
        if self._within:
            raise CannotCatchUpError(
                "Memory ran out within a collective: nobody knows whether the peers got it."
            )
        if self.foreign:
            raise CannotCatchUpError(
                "The step issues collectives that are not FSDP2's (SyncBatchNorm, tensor parallelism, "
                "self.all_gather); a rank that fails can't join its peers in them."
            )
        issued = tuple(self._issued)
        rests = {tape[len(issued) :] for tape in self._known() if tape[: len(issued)] == issued}
        if len(rests) > 1 or (not rests and (smallest_part is None or self._known())):
            raise CannotCatchUpError(
                f"Memory ran out after {len(issued)} collectives of a part, and no earlier part tells which ones the "
                "peers wait for. Start with a smaller micro_batch_size."
            )
        self.reset()
        try:
            if rests:
                for entry in rests.pop():
                    self._issue(entry)
            elif smallest_part is not None:
                self._rehearse(list(issued), smallest_part)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise CannotCatchUpError(
                f"Not even one layer fits while the peers wait for it: {error}"
            ) from None
        self.reset()

    def _rehearse(self, left_out: list[_Issued], smallest_part: Callable[[], object]) -> None:
        """Run a part whose first collectives, which the peers have had, are left out."""
        self._issued, self._left_out = [], left_out
        self._recording = self._silent = True
        try:
            smallest_part()
        finally:
            self._recording = self._silent = False
            self._left_out = []
        self._remember()

    def _known(self) -> list[tuple[_Issued, ...]]:
        """What parts that begin like this one have issued."""
        exact = self._tapes.get(self._key)
        if exact:
            return exact
        kind, unsharded = self._key
        whole = self._tapes.get((kind, (False,) * len(unsharded)), [])
        return [_without_first_gathers(tape, unsharded) for tape in whole]

    def _issue(self, entry: _Issued) -> None:
        group = self._groups[entry.group]
        if entry.kind == "all_gather":
            group.unshard()  # its own shards, so that the peers compute on the weights they expect
            group._all_gather_result = None
            return
        comm, device = group._reduce_scatter_comm, group.device
        process_group = group._reduce_scatter_process_group
        whole = comm.allocate((entry.numel,), dtype=entry.dtype, device=device).zero_()
        shard = comm.allocate((entry.numel // process_group.size(),), dtype=entry.dtype, device=device)
        comm(output_tensor=shard, input_tensor=whole, group=process_group, op=entry.operation)


def _without_first_gathers(tape: tuple[_Issued, ...], unsharded: tuple[bool, ...]) -> tuple[_Issued, ...]:
    """A part's collectives where some groups begin unsharded (after validation, say): these are not gathered first."""
    waiting = {index for index, is_unsharded in enumerate(unsharded) if is_unsharded}
    kept = []
    for entry in tape:
        if entry.kind == "all_gather" and entry.group in waiting:
            waiting.remove(entry.group)
        else:
            kept.append(entry)
    return tuple(kept)


class _Recorded:
    """FSDP2's own collective, written down."""

    kind = ""

    def __init__(self, owner: CatchUp, index: int, inner: Any) -> None:
        self.inner = inner
        self._owner = owner
        self._index = index

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.inner.allocate(size, dtype=dtype, device=device)

    def _passed_on(self, entry: _Issued, **arguments: Any) -> Any:
        owner = self._owner
        if owner._left_out:
            if owner._left_out.pop(0) != entry:
                raise CannotCatchUpError(
                    "A smallest part issues other collectives than the part that failed."
                )
            owner._issued.append(entry)
            arguments["output_tensor"].zero_()
            return None
        owner._within = True
        work = self.inner(**arguments)
        owner._within = False
        if owner._recording:
            owner._issued.append(entry)
        return work


class _AllGather(_Recorded):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        entry = _Issued("all_gather", self._index, output_tensor.numel(), output_tensor.dtype)
        return self._passed_on(
            entry, output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=async_op
        )


class _ReduceScatter(_Recorded):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        if self._owner._silent:
            input_tensor.zero_()
        entry = _Issued("reduce_scatter", self._index, input_tensor.numel(), input_tensor.dtype, op)
        return self._passed_on(
            entry,
            output_tensor=output_tensor,
            input_tensor=input_tensor,
            group=group,
            op=op,
            async_op=async_op,
        )
