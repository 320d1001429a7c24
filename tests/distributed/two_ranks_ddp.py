"""Run on ranks by test_ddp.py: averages gradients after the backward and by DDP itself, on two ranks."""

import sys
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_memkit.distributed.agreement import Agreement, StepOutcome
from lightning_memkit.distributed.collectives import collectives_issued
from lightning_memkit.distributed.ddp import LateReduction, broadcast_buffers, local_gradients
from lightning_memkit.memory.meter import ByteMeter
from tests.plugins.ranks import leave

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"find_unused_parameters": True},
    "bucket_view": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "static": {"static_graph": True},
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Branches(nn.Module):
    """Layers that all ranks use, one that rank 1 alone uses (unless the graph is static), and one nobody uses."""

    def __init__(self, same: bool) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(7, 33), nn.BatchNorm1d(33)
        self.own, self.idle, self.last = nn.Linear(33, 33), nn.Linear(5, 5), nn.Linear(33, 3)
        self.same = same

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).tanh()
        if self.same or distributed.get_rank() == 1:
            x = self.own(x)
        return self.last(x)


def wrapped(option: str, dtype: torch.dtype) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Branches(option == "static").to(dtype), **OPTIONS[option])


def gradients(ddp: DistributedDataParallel) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in ddp.module.named_parameters()}


def loss_of(ddp: DistributedDataParallel, part: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * part + distributed.get_rank())
    x = torch.randn(8, 7, generator=generator).to(next(ddp.parameters()).dtype)
    return ddp(x).float().pow(2).mean()


def by_ddp(option: str, dtype: torch.dtype) -> dict[str, Any]:
    ddp = wrapped(option, dtype)
    if option == "static":  # its first iteration must be a synchronized one
        loss_of(ddp, 0).backward()
        ddp.zero_grad()
        ddp.module.load_state_dict(wrapped(option, dtype).module.state_dict())
    with ddp.no_sync():
        loss_of(ddp, 0).backward()
    loss_of(ddp, 1).backward()
    return gradients(ddp)


def late(option: str, dtype: torch.dtype, agreement: Agreement, bucket_bytes: int) -> dict[str, Any]:
    ddp = wrapped(option, dtype)
    reduction = LateReduction(ddp, bucket_bytes)
    before = collectives_issued()
    with local_gradients(ddp):
        for part in range(2):
            loss_of(ddp, part).backward()
    issued = collectives_issued()
    meeting = reduction.agree(agreement, StepOutcome.DONE)
    with ByteMeter() as meter:
        reduction.reduce()
    found = gradients(ddp)
    return {
        "gradients": found,
        "collectives": None if issued is None or before is None else issued - before,
        "failed": meeting.failed,
        "allocations": meter.allocations,
    }


def float32_gradients(agreement: Agreement) -> dict[str, Any]:
    """Of bfloat16 weights; the oracle is the mean of what was gathered."""
    ddp = wrapped("plain", torch.bfloat16)
    ddp.module.own.requires_grad_(False)
    for parameter in ddp.parameters():
        parameter.grad_dtype = torch.float32  # pyright: ignore[reportAttributeAccessIssue]
    reduction = LateReduction(ddp)
    with local_gradients(ddp):
        for part in range(2):
            loss_of(ddp, part).backward()
    mean = {}
    for name, gradient in gradients(ddp).items():
        if gradient is not None:
            both = [torch.empty_like(gradient) for _ in range(2)]
            distributed.all_gather(both, gradient)
            mean[name] = both[0] / 2 + both[1] / 2
    reduction.agree(agreement, StepOutcome.DONE)
    reduction.reduce()
    return {"mean": mean, "found": {k: v for k, v in gradients(ddp).items() if v is not None}}


def failures(agreement: Agreement) -> dict[str, Any]:
    """One rank's failure leaves all gradients as they were; also where it fails at making zeros."""
    ddp = wrapped("plain", torch.float32)
    rank = distributed.get_rank()
    reduction = LateReduction(ddp)
    with local_gradients(ddp):
        loss_of(ddp, 0).backward()
    before = gradients(ddp)
    meeting = reduction.agree(agreement, StepOutcome.OUT_OF_MEMORY if rank == 1 else StepOutcome.DONE)
    after = gradients(ddp)
    with ByteMeter(fail_at=0 if rank == 0 else None):  # rank 0 lacks what rank 1 alone has used
        at_zeros = reduction.agree(agreement, StepOutcome.DONE)
    untouched = [torch.equal(a, b) for a, b in zip(before.values(), after.values(), strict=True)
                 if a is not None and b is not None]  # fmt: skip
    return {"failed": meeting.failed, "at_zeros": at_zeros.failed, "untouched": untouched}


def overflow(agreement: Agreement) -> Tensor:
    """Gradients whose sum is infinite, but not their mean."""
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    reduction = LateReduction(ddp)
    ddp.module.weight.grad = torch.tensor([[3e38]])
    reduction.agree(agreement, StepOutcome.DONE)
    reduction.reduce()
    assert ddp.module.weight.grad is not None
    return ddp.module.weight.grad


def strided(agreement: Agreement) -> dict[str, Tensor]:
    """Gradients in channels-last order, in a bucket and in place."""
    found = {}
    for bucket_bytes in (2**20, 8):
        ddp = DistributedDataParallel(nn.Conv2d(3, 4, 3, bias=False).to(memory_format=torch.channels_last))  # pyright: ignore
        reduction = LateReduction(ddp, bucket_bytes)
        values = torch.arange(108.0).view(4, 3, 3, 3) * (1 + 2 * distributed.get_rank())
        ddp.module.weight.grad = values.to(memory_format=torch.channels_last)
        reduction.agree(agreement, StepOutcome.DONE)
        with ByteMeter() as meter:
            reduction.reduce()
        found[str(bucket_bytes)] = ddp.module.weight.grad if meter.allocations == 0 else torch.empty(0)
    return found


def buffers() -> dict[str, Any]:
    found = {}
    for sync in (True, False):
        ddp = DistributedDataParallel(Branches(True))
        ddp.broadcast_buffers = sync
        ddp.module.norm.running_mean.fill_(distributed.get_rank() + 1)
        broadcast_buffers(ddp)
        both = [torch.empty(33) for _ in range(2)]
        distributed.all_gather(both, ddp.module.norm.running_mean)
        found[str(sync)] = [float(mean[0]) for mean in both]
    return found


def main(path: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    parameters = sum(1 for _ in Branches(False).parameters())
    agreement = Agreement(parameters)
    found: dict[str, Any] = {
        "failures": failures(agreement),
        "float32": float32_gradients(agreement),
        "overflow": overflow(agreement),
        "strided": strided(agreement),
        "buffers": buffers(),
        "numbers": [agreement.largest([agreement.rank, 2.5]), agreement.smallest([agreement.rank, 2.5]),
                    agreement.total([agreement.rank, 2.5])],
    }  # fmt: skip
    for option in OPTIONS:
        for name, dtype in DTYPES.items():
            found[f"{option}-{name}"] = {
                "ddp": by_ddp(option, dtype),
                "late": late(option, dtype, agreement, 25 * 2**20),
                "late in small buckets": late(option, dtype, agreement, 300),
            }
    if distributed.get_rank() == 0:
        torch.save(found, path)
    agreement.close()
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
