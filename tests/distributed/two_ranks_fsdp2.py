"""Run on ranks by test_fsdp2.py: a sharded step that runs out of memory at every allocation in turn."""

import signal
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lightning_memkit.distributed.agreement import Agreement, StepOutcome
from lightning_memkit.distributed.catch_up import CatchUp, why_no_catch_up
from lightning_memkit.distributed.clipping import can_clip, clip_sharded_gradients
from lightning_memkit.memory.meter import ByteMeter
from tests.plugins.ranks import leave

LIMIT_SECONDS = 60
ROWS = 8
PARTS, SMALLER = (4, 4), (2, 2, 2, 2)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointed": {"checkpointed": True},
    "mixed precision": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "no root": {"root": False},
    "never resharded": {"reshard_after_forward": False},
}
WHO = {"rank 1": (False, True), "rank 0": (True, False), "both": (True, True)}


class Block(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(10, 18), nn.Linear(18, 10), nn.LayerNorm(10)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            return checkpoint(self.mixed, x, use_reentrant=False)  # pyright: ignore[reportReturnType]
        return self.mixed(x)

    def mixed(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.dropout(self.up(self.norm(x)).tanh(), 0.2))


class Net(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(5, 10), nn.Linear(10, 3)
        self.blocks = nn.ModuleList(Block(checkpointed) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def sharded(checkpointed: bool = False, root: bool = True, **options: Any) -> Net:
    torch.manual_seed(0)
    net = Net(checkpointed)
    for part in (*net.blocks, *(() if root else (net.into, net.out))):
        fully_shard(part, **options)
    return fully_shard(net, **options) if root else net  # pyright: ignore[reportReturnType]


class Runner:
    """A training loop's part that a fault concerns: parts, agreement after each, and the retry."""

    def __init__(self, net: Net) -> None:
        assert not why_no_catch_up(net), why_no_catch_up(net)
        self.net, self.agreement, self.catch_up = net, Agreement(), CatchUp(net)
        self.retries = 0
        generator = torch.Generator().manual_seed(7 + distributed.get_rank())
        self.batch = torch.randn(ROWS, 5, generator=generator)

    def part(self, rows: Tensor, meter: ByteMeter) -> bool:
        """Whether this rank ran out of memory in it."""
        try:
            with self.catch_up.part(), meter:
                loss = self.net(rows).float().pow(2).mean() * (len(rows) / ROWS)
                loss.backward()
        except torch.OutOfMemoryError:
            return True
        return False

    def smallest_part(self) -> None:
        self.net(self.batch[:1]).float().pow(2).mean().backward()

    def attempt(self, sizes: Sequence[int], meter: ByteMeter) -> bool:
        for rows in self.batch.split(list(sizes)):
            failed = self.part(rows, meter)
            if failed:
                self.catch_up.finish(self.smallest_part)
            outcome = StepOutcome.OUT_OF_MEMORY if failed else StepOutcome.DONE
            if self.agreement.meet(outcome).any_failed:
                self.catch_up.reset()
                return False
        return True

    def step(self, sizes: Sequence[int], fail_at: int | None = None) -> int:
        """A step's gradients, in smaller parts where the given ones fail; how often the meter counted."""
        meter = ByteMeter(fail_at=fail_at)
        while True:
            torch.manual_seed(distributed.get_rank())
            self.net.zero_grad()
            if self.attempt(sizes, meter):
                return meter.allocations
            self.retries += 1
            sizes, meter = SMALLER, ByteMeter()

    def gradients(self) -> list[Tensor]:
        return gradients_of(self.net)

    def close(self) -> None:
        self.catch_up.close()
        self.agreement.close()


def gradients_of(net: nn.Module) -> list[Tensor]:
    return [p.grad.to_local().clone() for p in net.parameters() if isinstance(p.grad, DTensor)]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) > 0 and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def on_all_ranks(truth: bool, agreement: Agreement) -> bool:
    return agreement.smallest([float(truth)])[0] > 0


def swept(options: dict[str, Any], fails: Sequence[bool], stride: int) -> dict[str, int]:
    """Every allocation of a step in two parts fails on the ranks that are to; those before the retry differ."""
    runner = Runner(sharded(**options))
    expected, unsplit, points = fault_free(runner)
    found = {"points": 0, "equal": 0, "retried": 0}
    rank = distributed.get_rank()
    for point in range(0, points, stride):
        before = runner.retries
        mine = point if rank == 1 else point // 2  # where both fail, they do so at different places
        signal.alarm(LIMIT_SECONDS)
        runner.step(PARTS, mine if fails[rank] else None)
        retried = runner.retries > before
        equal = same(runner.gradients(), expected if retried else unsplit)
        found["points"] += 1
        found["equal"] += on_all_ranks(equal, runner.agreement)
        found["retried"] += retried
    signal.alarm(0)
    runner.close()
    return found


def swept_cold(options: dict[str, Any], stride: int) -> dict[str, int]:
    """Every allocation of a new module's first part fails on rank 1: nothing is known of what parts issue."""
    runner = Runner(sharded(**options))
    expected, _, _ = fault_free(runner)
    runner.close()
    cold = Runner(sharded(**options))
    points = int(cold.agreement.largest([cold.step(PARTS)])[0]) // len(PARTS)
    cold.close()
    found = {"points": 0, "equal": 0, "retried": 0}
    for point in range(0, points, stride):
        runner = Runner(sharded(**options))
        signal.alarm(LIMIT_SECONDS)
        runner.step(PARTS, point if distributed.get_rank() == 1 else None)
        found["points"] += 1
        found["equal"] += on_all_ranks(same(runner.gradients(), expected), runner.agreement)
        found["retried"] += runner.retries
        runner.close()
    signal.alarm(0)
    return found


def fault_free(runner: Runner) -> tuple[list[Tensor], list[Tensor], int]:
    """Gradients of a step in smaller parts, in the given ones, and how many allocations the latter has."""
    runner.step(SMALLER)
    expected = runner.gradients()
    points = int(runner.agreement.largest([runner.step(PARTS)])[0])
    return expected, runner.gradients(), points


def swept_after_validation(stride: int) -> dict[str, int]:
    """A forward without gradients leaves the root's parameters gathered: the next part issues one all-gather less."""
    runner = Runner(sharded())
    expected, unsplit, points = fault_free(runner)
    found = {"points": 0, "equal": 0}
    for point in range(0, points, stride):
        with torch.no_grad():
            runner.net(runner.batch)
        before = runner.retries
        signal.alarm(LIMIT_SECONDS)
        runner.step(PARTS, point if distributed.get_rank() == 1 else None)
        retried = runner.retries > before  # the last point is not reached: the root is not gathered
        equal = same(runner.gradients(), expected if retried else unsplit)
        found["points"] += retried
        found["equal"] += retried and on_all_ranks(equal, runner.agreement)
    signal.alarm(0)
    runner.close()
    return found


def swept_storages(options: dict[str, Any], stride: int) -> dict[str, int]:
    """Each time that the engine gives a gathered parameter its memory back, it fails on rank 1."""
    runner = Runner(sharded(**options))
    expected, _, _ = fault_free(runner)
    stock, calls, fails_at = _fsdp_param.alloc_storage, 0, -1

    def alloc_storage(tensor: Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls - 1 == fails_at:
            raise torch.OutOfMemoryError("A gathered parameter's storage was made to fail.")
        stock(tensor)

    _fsdp_param.alloc_storage = alloc_storage
    runner.step(PARTS)
    found = {"points": 0, "equal": 0, "retried": 0}
    for point in range(0, calls, stride):
        calls, fails_at = 0, point if distributed.get_rank() == 1 else -1
        before = runner.retries
        signal.alarm(LIMIT_SECONDS)
        runner.step(PARTS)
        found["points"] += 1
        found["equal"] += on_all_ranks(same(runner.gradients(), expected), runner.agreement)
        found["retried"] += runner.retries > before
    signal.alarm(0)
    _fsdp_param.alloc_storage = stock
    runner.close()
    return found


def swept_first_forward() -> dict[str, int]:
    """The engine sets itself up in the first forward; each step of that fails on rank 1."""
    runner = Runner(sharded())
    expected, _, _ = fault_free(runner)
    found = {"points": 0, "equal": 0, "retried": 0}
    param_class: Any = _fsdp_param.FSDPParam
    stock = param_class.reset_sharded_param
    for point in range(len(list(runner.net.parameters()))):
        cold, calls = Runner(sharded()), 0

        def reset_sharded_param(param: Any, point: int = point) -> None:
            nonlocal calls
            calls += 1
            if calls - 1 == point and distributed.get_rank() == 1:
                raise torch.OutOfMemoryError("A padded shard was made to fail.")
            stock(param)

        param_class.reset_sharded_param = reset_sharded_param
        signal.alarm(LIMIT_SECONDS)
        cold.step(PARTS)
        found["points"] += 1
        found["equal"] += on_all_ranks(same(cold.gradients(), expected), cold.agreement)
        found["retried"] += cold.retries
        cold.close()
    signal.alarm(0)
    param_class.reset_sharded_param = stock
    runner.close()
    return found


def silent() -> dict[str, Any]:
    """Rank 1's part does not count, and its loss is not a number: gradients are half of rank 0's."""
    runner, rank = Runner(sharded()), distributed.get_rank()
    alone = Runner(sharded())
    for each, factor in ((runner, float("nan")), (alone, 0.0)):
        torch.manual_seed(0)
        with each.catch_up.part(counts=rank == 0 or each is alone):
            loss = each.net(runner.batch).pow(2).mean()
            (loss * (factor if rank == 1 else 1.0)).backward()
    finite = all(bool(g.isfinite().all()) for g in runner.gradients())
    return {"equal": same(runner.gradients(), alone.gradients()), "finite": finite}


def refusals() -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    hooked = sharded()
    hooked.set_all_reduce_hook(lambda gradients: None)  # pyright: ignore[reportCallIssue]
    own = sharded()
    own.set_custom_all_gather(OwnGather())  # pyright: ignore[reportCallIssue]
    older = sharded()
    del older._get_fsdp_state()._modules_to_run_forward  # pyright: ignore[reportCallIssue]
    nets = {"replicated": sharded(mesh=mesh), "hook": hooked, "own": own, "older": older, "plain": sharded()}
    return {name: why_no_catch_up(net) for name, net in nets.items()}


class OwnGather:
    """Stands for a user's own collective."""


def clipping() -> dict[str, Any]:
    """Ours against torch's, and every allocation of it failing on rank 1: all ranks hear of it, none is changed."""
    found: dict[str, Any] = {"points": 0, "equal": 0, "all raised": 0, "unchanged": 0}
    agreement = Agreement()

    def any_failed(failed: bool) -> bool:
        return agreement.meet(StepOutcome.OUT_OF_MEMORY if failed else StepOutcome.DONE).any_failed

    for dtype in (torch.float32, torch.bfloat16):
        for most in (0.01, 0.3, 100.0):
            nets = [sharded().to(dtype) for _ in range(2)]
            for net in nets:
                generator = torch.Generator().manual_seed(distributed.get_rank())
                torch.manual_seed(0)
                net(torch.randn(4, 5, generator=generator).to(dtype)).float().pow(2).sum().backward()
            assert can_clip(nets[0].parameters())
            theirs = nn.utils.clip_grad_norm_(nets[1].parameters(), most).full_tensor()  # pyright: ignore
            for point in range(100):
                before = gradients_of(nets[0])
                try:
                    with ByteMeter(fail_at=point if agreement.rank == 1 else None):
                        ours = clip_sharded_gradients(nets[0].parameters(), most, any_failed)
                    raised = False
                except torch.OutOfMemoryError:
                    raised = True
                if not agreement.largest([float(raised)])[0]:
                    equal = torch.equal(ours, theirs) and same(*map(gradients_of, nets))  # pyright: ignore
                    found["equal"] += on_all_ranks(equal, agreement)
                    break
                found["points"] += 1
                found["all raised"] += on_all_ranks(raised, agreement)
                found["unchanged"] += on_all_ranks(same(gradients_of(nets[0]), before), agreement)
    agreement.close()
    return found


def main(path: str, stride: str, *sweeps: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    found: dict[str, Any] = {"clipping": clipping(), "silent": silent(), "refusals": refusals()}
    for sweep in sweeps:
        found[sweep] = of(sweep, int(stride))
    if distributed.get_rank() == 0:
        print(found)
        torch.save(found, path)
    leave()


def of(sweep: str, stride: int) -> dict[str, int]:
    if sweep == "validated":
        return swept_after_validation(stride)
    if sweep == "first forward":
        return swept_first_forward()
    option, _, who = sweep.partition(", ")
    if option == "storages":
        return swept_storages({"checkpointed": True} if who else {}, max(1, stride // 6))
    sparser = stride * (1 if stride == 1 or option == "checkpointed" else 3)
    if who == "cold":
        return swept_cold(OPTIONS[option], sparser)
    return swept(OPTIONS[option], WHO[who], sparser)


if __name__ == "__main__":
    main(*sys.argv[1:])
