"""Reduce DDP's gradients after the backward, so that ranks can agree before any gradient is reduced."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_memkit.distributed.agreement import Agreement, Meeting, StepOutcome
from lightning_memkit.distributed.timeouts import waiting_for_ranks
from lightning_memkit.memory.out_of_memory import is_out_of_memory

_BUCKET_BYTES = 25 * 2**20  # DDP's own default


def why_no_late_reduction(ddp: DistributedDataParallel) -> str:
    """Why gradients must be reduced within the backward, as DDP does; empty if they need not."""
    for name, module in ddp.module.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            return f"the forward of {name} (SyncBatchNorm) communicates: a rank that fails leaves its peers in it"
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            return f"{name} has sparse gradients, whose size differs from rank to rank"
    if getattr(ddp, "_comm_hooks", None) or _built_in_hook(ddp):
        return "a communication hook (register_comm_hook) reduces the gradients"
    if getattr(ddp, "mixed_precision", None) is not None:
        return "DDP's own mixed_precision reduces the gradients"
    if getattr(ddp, "_delay_all_reduce_params", None):
        return "delay_all_reduce_named_params reduces gradients within the backward"
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in ddp.module.parameters()):
        return "an optimizer steps within the backward"
    return ""


def _built_in_hook(ddp: DistributedDataParallel) -> str:
    describe: Any = getattr(ddp, "_get_ddp_logging_data", None)
    return str(describe().get("comm_hook", "")) if describe is not None else ""


@contextmanager
def local_gradients(ddp: DistributedDataParallel) -> Iterator[None]:
    """Within the context, forward and backward issue no collectives: gradients and buffers stay local."""
    # A static graph's first backward is reduced even under `no_sync`; buffers are broadcast in the first forward.
    kept = {name: getattr(ddp, name) for name in ("static_graph", "require_forward_param_sync")}
    ddp.static_graph = ddp.require_forward_param_sync = False
    try:
        with ddp.no_sync():
            yield
    finally:
        for name, value in kept.items():
            setattr(ddp, name, value)


def broadcast_buffers(ddp: DistributedDataParallel) -> None:
    """Broadcast rank 0's buffers, if DDP would do so before a step's first forward; allocates nothing."""
    wanted = getattr(ddp, "forward_sync_buffers", None)  # torch 2.13 renamed it
    if not (ddp.broadcast_buffers if wanted is None else wanted):
        return
    group: Any = ddp.process_group
    source = distributed.get_global_rank(group, 0)
    for name, buffer in ddp.module.named_buffers():
        if name not in ddp.parameters_to_ignore and buffer.numel():
            whole = buffer.detach().contiguous()
            with waiting_for_ranks("rank 0's buffers were broadcast", group):
                distributed.broadcast(whole, source, group=group)
            if whole.data_ptr() != buffer.data_ptr():
                with torch.no_grad():
                    buffer.copy_(whole)


class LateReduction:
    """Averages gradients over ranks after the backward: DDP's values, 50 MiB of buffers, no overlap.

    Each bucket is divided by the number of ranks before it is summed, as in DDP: with two ranks the result is
    bitwise DDP's; with more the order of the sum may differ, as it does between DDP's own bucket sizes. A
    gradient keeps its dtype, so float32 gradients of bfloat16 weights are reduced in float32.

    Args:
        ddp: the wrapped module, whose process group is used.
        bucket_bytes: how many bytes are sent at once. A larger gradient is reduced in place.
    """

    def __init__(self, ddp: DistributedDataParallel, bucket_bytes: int = _BUCKET_BYTES) -> None:
        named = ddp.module.named_parameters()
        ignored = ddp.parameters_to_ignore
        self.parameters = [p for name, p in named if p.requires_grad and name not in ignored]
        self._group: Any = ddp.process_group
        self._world: int = self._group.size()
        largest = min(bucket_bytes, sum(_most_bytes(p) for p in self.parameters))
        device = self.parameters[0].device if self.parameters else torch.device("cpu")
        # Two, so that one is filled while the other is being reduced; of bytes, since gradients may change
        # dtype.
        self._buffers = [torch.zeros(largest, dtype=torch.uint8, device=device) for _ in range(2)]

    def agree(self, agreement: Agreement, outcome: StepOutcome) -> Meeting:
        """Tell all ranks who failed, and add zero gradients where only other ranks have one.

        Needs a second meeting if ranks differ in which gradients they have, because allocating the zeros may
        fail.
        """
        have = [int(parameter.grad is not None) for parameter in self.parameters]
        meeting = agreement.meet(outcome, have)
        if meeting.any_failed:
            return meeting
        partly = [0 < count < agreement.world for count in meeting.counts]
        if not any(partly):
            return meeting
        outcome = StepOutcome.DONE
        try:
            for parameter, wanted in zip(self.parameters, partly, strict=True):
                if wanted and parameter.grad is None:
                    dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
                    parameter.grad = torch.zeros_like(parameter, dtype=dtype)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            outcome = StepOutcome.OUT_OF_MEMORY
        return agreement.meet(outcome)

    @torch.no_grad()
    def reduce(self) -> None:
        """Average the gradients in place; allocates nothing. All ranks must have agreed that none failed."""
        travelling: list[Callable[[], None]] = []
        for index, gradients in enumerate(self._buckets()):
            if len(travelling) == len(self._buffers):
                travelling.pop(0)()
            travelling.append(self._send(gradients, self._buffers[index % len(self._buffers)]))
        for arrive in travelling:
            arrive()

    def _buckets(self) -> Iterator[list[Tensor]]:
        """Buckets of gradients of one dtype that fit a buffer, starting with the last parameter."""
        gradients: list[Tensor] = []
        room = 0
        for parameter in reversed(self.parameters):
            gradient = parameter.grad
            if gradient is None or not gradient.numel():
                continue
            if gradient.layout != torch.strided:
                raise TypeError(
                    f"A gradient of layout {gradient.layout} can't be averaged after the backward; with "
                    "MemoryBudget(recover=False) DDP averages it."
                )
            if gradients and (gradient.nbytes > room or gradient.dtype != gradients[0].dtype):
                yield gradients
                gradients = []
            room = (room if gradients else len(self._buffers[0])) - gradient.nbytes
            gradients.append(gradient)
        if gradients:
            yield gradients

    def _send(self, gradients: list[Tensor], buffer: Tensor) -> Callable[[], None]:
        """Start a bucket's all-reduce; returns a function that waits and copies the averages back."""
        first = gradients[0]
        if first.nbytes > len(buffer):  # alone in its bucket
            flat = _flat(first)
            parts = [flat.view(first.shape)]
        else:
            count = sum(gradient.numel() for gradient in gradients)
            flat = buffer[: count * first.element_size()].view(first.dtype)
            parts = [
                part.view(gradient.shape)
                for part, gradient in zip(flat.split([g.numel() for g in gradients]), gradients, strict=True)
            ]
            torch._foreach_copy_(parts, gradients)
        flat.mul_(1 / self._world)
        real = torch.view_as_real(flat) if flat.is_complex() else flat
        work: Any = distributed.all_reduce(real, group=self._group, async_op=True)

        def arrive() -> None:
            with waiting_for_ranks("gradients were averaged", self._group):
                work.wait()
            if flat.data_ptr() != first.data_ptr():
                torch._foreach_copy_(gradients, parts)

        return arrive


def _flat(gradient: Tensor) -> Tensor:
    """A view of a gradient's memory in one dimension, or a copy if it has gaps."""
    span = 1 + sum(
        (size - 1) * stride for size, stride in zip(gradient.shape, gradient.stride(), strict=True)
    )
    if span != gradient.numel():
        return gradient.contiguous().view(-1)
    return gradient.as_strided((span,), (1,))


def _most_bytes(parameter: Tensor) -> int:
    """The most bytes of its gradient, which may be float32 for a bfloat16 weight."""
    return parameter.numel() * max(4, parameter.element_size())
