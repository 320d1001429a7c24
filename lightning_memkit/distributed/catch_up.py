"""A rank that failed in FSDP2's forward or backward issues the collectives for which its peers still wait.

Sharded ranks communicate in every layer: if one fails, the others wait in the next all-gather or
reduce-scatter. A micro-batch issues the same collectives each time and on all ranks, so they are recorded
once, from a micro-batch that succeeded. A rank that fails after k collectives resets its engine and issues
the remaining ones without a forward: with its own shards in all-gathers, with zeros in reduce-scatters. Its
peers finish their micro-batch, and all ranks discard it together. If no micro-batch has succeeded yet, it
runs one of a single row instead, without its first k collectives.
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
    """One collective of a micro-batch."""

    kind: str
    group: int
    numel: int
    dtype: torch.dtype
    operation: Any = field(default=None, compare=False)


class CannotCatchUpError(Exception):
    """This rank can't join the collectives in which its peers wait, so it must end, and they with it.

    Not a RuntimeError, since those that mention memory are retried.
    """


def why_no_catch_up(module: nn.Module) -> str:
    """Why a rank can't catch up with its peers under FSDP2; empty if it can."""
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
    """Records the collectives of micro-batches, and issues those that an interrupted one has not issued.

    It costs a Python call a collective. Within a `part` that does not count, this rank contributes exact
    zeros to the gradients, even if its loss is not a number.

    Args:
        module: contains the modules to which `fully_shard` was applied; `why_no_catch_up` must be empty.
    """

    def __init__(self, module: nn.Module) -> None:
        self.foreign = False  # whether micro-batches issue collectives that are not FSDP2's
        self._module = module
        self._states = [state for state in sharded_states(module) if parameter_groups([state])]
        self._groups = parameter_groups(self._states)
        self._tapes: dict[Any, list[tuple[_Issued, ...]]] = {}
        self._issued: list[_Issued] = []
        self._key: Any = None
        self._recording = self._silent = False
        self._left_out: list[_Issued] = []  # collectives that a trial of one row must not issue again
        self._within = False  # inside a collective, which may or may not have been issued
        for index, (state, group) in enumerate(zip(self._states, self._groups, strict=True)):
            state._modules[0].set_custom_all_gather(_AllGather(self, index, group._all_gather_comm))
            state._modules[0].set_custom_reduce_scatter(
                _ReduceScatter(self, index, group._reduce_scatter_comm)
            )

    def close(self) -> None:
        """Restore FSDP2's own collectives."""
        for state, group in zip(self._states, self._groups, strict=True):
            state._modules[0].set_custom_all_gather(group._all_gather_comm.inner)
            state._modules[0].set_custom_reduce_scatter(group._reduce_scatter_comm.inner)

    def begin(self) -> None:
        """Before a step: reshard all groups until some micro-batch that began sharded has been recorded."""
        if not any(not any(unsharded) for _, unsharded in self._tapes):
            for state, group in zip(self._states, self._groups, strict=True):
                if group.is_unsharded:  # left unsharded by validation
                    state._modules[0].reshard()

    @contextmanager
    def part(self, *, counts: bool = True, kind: str = "train") -> Iterator[None]:
        """Enclose one micro-batch: its transfer, forward and backward; `kind` names the pass."""
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
        """Reset FSDP2's engine to its state between two steps."""
        reset_fsdp(self._module)

    def finish(self, smallest_part: Callable[[], object] | None = None) -> None:
        """Issue the remaining collectives of an interrupted micro-batch, once its tensors are freed.

        Needs memory for the largest layer's parameters or gradients, but no activations.

        Args:
            smallest_part: forward and backward of one row, used if no such micro-batch has succeeded before.

        Raises:
            CannotCatchUpError: the peers' next collectives are unknown, or need more memory than there is.
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
                f"Memory ran out after {len(issued)} collectives of a micro-batch, and no earlier one tells which of "
                "them the peers wait for. Start with a smaller micro_batch_size."
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
        """Run a micro-batch of one row without its first collectives, which the peers have had already."""
        self._issued, self._left_out = [], left_out
        self._recording = self._silent = True
        try:
            smallest_part()
        finally:
            self._recording = self._silent = False
            self._left_out = []
        self._remember()

    def _known(self) -> list[tuple[_Issued, ...]]:
        """The recorded collectives of micro-batches that began in the same state."""
        exact = self._tapes.get(self._key)
        if exact:
            return exact
        kind, unsharded = self._key
        whole = self._tapes.get((kind, (False,) * len(unsharded)), [])
        return [_without_first_gathers(tape, unsharded) for tape in whole]

    def _issue(self, entry: _Issued) -> None:
        group = self._groups[entry.group]
        if entry.kind == "all_gather":
            group.unshard()  # gathers the real shards, so that the peers compute with correct weights
            group._all_gather_result = None
            return
        comm, device = group._reduce_scatter_comm, group.device
        process_group = group._reduce_scatter_process_group
        whole = comm.allocate((entry.numel,), dtype=entry.dtype, device=device).zero_()
        shard = comm.allocate((entry.numel // process_group.size(),), dtype=entry.dtype, device=device)
        comm(output_tensor=shard, input_tensor=whole, group=process_group, op=entry.operation)


def _without_first_gathers(tape: tuple[_Issued, ...], unsharded: tuple[bool, ...]) -> tuple[_Issued, ...]:
    """A micro-batch's collectives without the first all-gathers of groups that began unsharded."""
    waiting = {index for index, is_unsharded in enumerate(unsharded) if is_unsharded}
    kept = []
    for entry in tape:
        if entry.kind == "all_gather" and entry.group in waiting:
            waiting.remove(entry.group)
        else:
            kept.append(entry)
    return tuple(kept)


class _Recorded:
    """FSDP2's own collective, with recording."""

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
                    "The smallest micro-batch issues other collectives than the one that failed."
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
