import random
from array import array
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchmetrics import MeanMetric

from lightning_memkit.memory.meter import ByteMeter
from lightning_memkit.micro_batching.changes import kept_tensor
from lightning_memkit.micro_batching.changes.alike import alike
from lightning_memkit.micro_batching.changes.rollback import Rollback


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.metric = MeanMetric()
        self.register_buffer("constant", torch.arange(5.0))
        self.register_buffer("replaced", torch.zeros(2))
        self.seen: list[float] = []
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.new_attribute = self.count
        self.replaced = torch.ones(3)
        noise = random.random() + float(np.random.rand()) + torch.rand(1)
        out = self.norm(x) * noise
        self.seen.append(float(out.detach().mean()))
        self.metric.update(out.detach())
        return out


def everything(module: Stateful) -> list[Any]:
    tensors = [t.clone() for t in module.buffers()]
    return [*tensors, list(module.seen), module.count, hasattr(module, "new_attribute"),
            float(module.metric.mean_value), float(module.metric.weight), module.metric._update_count]  # fmt: skip


def equal(a: list[Any], b: list[Any]) -> bool:
    return all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a, b, strict=True)
    )  # pyright: ignore


def test_a_step_is_undone_and_repeats_bitwise() -> None:
    module = Stateful()
    module(torch.randn(8, 4))
    before, inputs = everything(module), torch.randn(8, 4)
    rollback = Rollback(module)
    first = module(inputs)
    assert not equal(everything(module), before)
    assert rollback.restore() == frozenset()
    assert equal(everything(module), before)
    assert torch.equal(module(inputs), first)


def test_only_what_changes_is_cloned_once_that_is_known() -> None:
    module = Stateful()
    module(torch.randn(8, 4))
    rollback = Rollback(module)
    module(torch.randn(8, 4))
    changing = rollback.changed()
    assert ("norm", "running_mean") in changing
    assert ("", "constant") not in changing
    rollback.restore()
    before = everything(module)
    known = Rollback(module, changing)
    module(torch.randn(8, 4))
    assert known.restore() == frozenset()
    assert equal(everything(module), before)


def test_a_tensor_that_was_not_cloned_is_named_as_lost() -> None:
    module = Stateful()
    rollback = Rollback(module, frozenset())
    dict(module.named_buffers())["constant"].add_(1)
    assert rollback.restore() == {("", "constant")}


def test_what_lies_deeper_is_put_back_too() -> None:
    from collections import defaultdict

    module = nn.Module()
    module.table = defaultdict(list, {"a": [1]})  # pyright: ignore
    module.nested = [[torch.zeros(2)], {"metric": MeanMetric()}]  # pyright: ignore
    module.array = np.zeros(3)  # pyright: ignore
    module.generator = torch.Generator().manual_seed(3)  # pyright: ignore
    module.register_buffer("late", None)
    drawn = module.generator.get_state()  # pyright: ignore
    rollback = Rollback(module)
    module.table["a"].append(2)  # pyright: ignore
    module.table["b"].append(3)  # pyright: ignore
    module.nested[0][0].add_(1)  # pyright: ignore
    module.nested[1]["metric"].update(5.0)  # pyright: ignore
    module.array += 1  # pyright: ignore
    torch.rand(1, generator=module.generator)  # pyright: ignore
    module.late = torch.ones(1)
    module.register_buffer("later", torch.ones(1))
    rollback.restore()
    assert module.table == {"a": [1]}
    assert module.nested[0][0].tolist() == [0, 0]  # pyright: ignore
    assert module.nested[1]["metric"]._update_count == 0  # pyright: ignore
    assert module.array.tolist() == [0, 0, 0]  # pyright: ignore
    assert torch.equal(module.generator.get_state(), drawn)  # pyright: ignore
    assert module.late is None
    assert not hasattr(module, "later")


def test_bytes_and_numbers_of_python_s_own_arrays_are_put_back() -> None:
    module = nn.Module()
    module.seen = bytearray(b"abc")  # pyright: ignore
    module.sums = array("d", [0.0, 1.0])  # pyright: ignore
    rollback = Rollback(module)
    module.seen[0] += 1  # pyright: ignore
    module.seen.append(7)  # pyright: ignore
    module.sums[1] = 5.0  # pyright: ignore
    assert {change.name for change in rollback.changes()} == {"seen", "sums"}
    rollback.restore()
    assert (module.seen, module.sums) == (bytearray(b"abc"), array("d", [0.0, 1.0]))


def test_large_bytes_are_copied_where_steps_were_seen_to_change_them() -> None:
    module = nn.Module()
    module.text = bytearray(2**17)  # pyright: ignore
    rollback = Rollback(module)
    module.text[0] = 1  # pyright: ignore
    assert rollback.changed() == {("", "text")}
    for changing, first in ((frozenset(), 2), (rollback.changed(), 1)):
        known = Rollback(module, changing)
        module.text[0] = 2  # pyright: ignore
        known.restore()
        assert module.text[0] == first  # pyright: ignore
        module.text[0] = 1  # pyright: ignore


class LongMemory(nn.Module):
    """Containers of more items than are looked into: a full queue, a count of words, a set, a list."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = deque(range(12_000), maxlen=12_000)
        self.counts = dict.fromkeys(range(12_000), 1)
        self.seen = set(range(12_000))
        self.rows = list(range(12_000))

    def forward(self) -> None:
        self.queue.append(-1)
        self.counts[3] += 1
        self.counts[-1] = 1
        self.seen.add(-1)
        del self.rows[0]

    def held(self) -> tuple[Any, ...]:
        return list(self.queue), dict(self.counts), set(self.seen), list(self.rows)


def test_long_containers_that_steps_change_are_put_back() -> None:
    """A queue that is full keeps its length: its items tell that a trial has changed it."""
    module = LongMemory()
    before = module.held()
    trial = Rollback(module)
    module()
    changing = trial.changed()
    trial.restore()
    assert module.held() == before
    assert changing == {("", name) for name in ("queue", "counts", "seen", "rows")}
    point = Rollback(module, changing)
    module()
    assert point.restore() == frozenset()
    assert module.held() == before


def test_a_long_container_that_was_not_copied_is_named_as_lost_and_copied_from_then_on() -> None:
    module = LongMemory()
    point = Rollback(module, frozenset())
    module.rows.append(5)  # a list loses again what it has gained
    module.seen.add(-1)
    module.counts[-1] = 1
    assert point.restore() == {("", "seen"), ("", "counts")}
    assert len(module.rows) == 12_000
    point = Rollback(module, frozenset())
    module.seen.add(-2)
    assert point.optimizer_steps() == {("", "seen")}


def test_bytes_of_a_batch_are_told_as_the_batch_s() -> None:
    batch = {"text": bytearray(b"abc")}
    rollback = Rollback(nn.Module(), batches=[batch])
    batch["text"][0] = 0
    assert [(change.kind, change.name) for change in rollback.changes()] == [("batch", "batch['text']")]
    rollback.restore()
    assert batch["text"] == b"abc"


def test_hooks_that_a_first_forward_installs_are_installed_once():
    """As transformers does to collect hidden states: an attribute says that the layers have their hooks."""

    class Collecting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.seen: list[int] = []

        def forward(self, x):
            if not getattr(self, "hooked", False):
                self.layer.register_forward_hook(lambda *_: self.seen.append(1))
                self.hooked = True
            return self.layer(x)

    module = Collecting()
    own = module.layer.register_forward_pre_hook(lambda *_: None)
    before = Rollback(module)
    module(torch.ones(1, 2))
    before.restore()
    module(torch.ones(1, 2))
    assert module.seen == [1]
    assert list(module.layer._forward_pre_hooks) == [own.id]


def test_a_tensor_whose_memory_its_owner_frees_within_the_step_is_left_to_the_owner() -> None:
    """Gathered parameters under FSDP2: they are written to, and freed once the backward is done."""

    class Gathering(nn.Module):
        def __init__(self, freed: bool) -> None:
            super().__init__()
            self.gathered = nn.Parameter(torch.ones(3))
            self.buffer = nn.Buffer(torch.ones(3))
            if freed:
                self.free()

        def free(self) -> None:
            for tensor in (self.gathered, self.buffer):
                tensor.untyped_storage().resize_(0)

        def forward(self) -> None:
            for tensor in (self.gathered, self.buffer):
                tensor.untyped_storage().resize_(12)
                with torch.no_grad():
                    tensor.fill_(2.0)
            self.free()

    for freed in (False, True):
        module = Gathering(freed)
        for changing in (None, frozenset({("", "buffer"), ("", "gathered")}), frozenset()):
            rollback = Rollback(module, changing)
            with rollback.watching():
                module()
            assert rollback.changed() == frozenset()
            assert rollback.restore() == frozenset()
        assert module.gathered.untyped_storage().nbytes() == 0


def test_a_sharded_module_s_shards_are_kept_while_gathered_weights_are_in_their_place(tmp_path: Path) -> None:
    """A forward without a backward, as in validation, leaves the outermost module's weights gathered."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        module: Any = fully_shard(
            nn.Linear(3, 3), mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=False
        )
        shard: Any = module.weight
        with torch.no_grad():
            module(torch.ones(1, 3))
        assert not isinstance(module.weight, DTensor)
        before = shard.to_local().clone()
        rollback = Rollback(module)
        with rollback.watching():
            module(torch.ones(1, 3)).sum().backward()  # frees what was gathered
            assert module.weight is shard
            with torch.no_grad():
                shard.mul_(2)
        assert rollback.changed() == {("", "weight")}
        assert rollback.restore() == frozenset()
        assert torch.equal(shard.to_local(), before)
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("is_nan", [False, True])
def test_a_comparison_allocates_nothing_of_the_tensors_size(is_nan: bool) -> None:
    """A trial on a full device compares what it changed before it puts it back."""
    values = torch.randn(1000)
    values[3] = float("nan") if is_nan else 0.0
    same, other = values.clone(), values.clone()
    other[7] += 1
    with ByteMeter() as meter:
        assert alike(values, same)
        if not is_nan:
            assert not alike(values, other)
    assert meter.peak_bytes <= 64
    assert not alike(values, other)


def test_what_there_is_no_memory_to_compare_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = nn.Linear(2, 2)
    module.kept = torch.zeros(3)
    rollback = Rollback(module)
    with rollback.watching():
        module.kept += 1

    def full(a: Any, b: Any) -> bool:
        raise torch.OutOfMemoryError("the device is full")

    with monkeypatch.context() as patched:
        patched.setattr(kept_tensor, "alike", full)
        assert rollback.changed() == {("", "kept")}
    rollback.restore()
    assert torch.equal(module.kept, torch.zeros(3))
