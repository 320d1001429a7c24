"""Collectives are counted on every backend of every group; what isn't counted is not taken for none."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed import distributed_c10d

from lightning_memkit.distributed.collectives import collectives_issued


class Counting:
    """A backend of a group, as `torch.distributed` has one for each kind of device."""

    def __init__(self, issued: int) -> None:
        self.issued = issued

    def _get_sequence_number_for_group(self) -> int:
        return self.issued


class Uncounted:
    def _get_sequence_number_for_group(self) -> int:
        raise RuntimeError("this backend does not yet support sequence numbers")


class Group:
    """A group whose own number is that of one of its backends, as torch's is."""

    def __init__(self, **backends: Any) -> None:
        self._backends = backends
        self._device_types = [SimpleNamespace(type=kind) for kind in backends]

    def _get_backend(self, device: Any) -> Any:
        return self._backends[device.type]

    def _get_sequence_number_for_group(self) -> int:
        return self._backends["cpu"]._get_sequence_number_for_group()


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Group]]:
    known: list[Group] = []
    with monkeypatch.context() as patched:
        patched.setattr(distributed, "is_initialized", lambda: True)
        patched.setattr(distributed_c10d, "_world", SimpleNamespace(pg_map=known))
        yield known


def test_each_backend_of_a_group_counts(groups: list[Group]) -> None:
    gloo, nccl = Counting(3), Counting(10)
    groups.append(Group(cpu=gloo, cuda=nccl))
    before = collectives_issued()
    nccl.issued += 2
    assert before is not None
    assert collectives_issued() == before + 2
    gloo.issued += 1
    assert collectives_issued() == before + 3


def test_a_backend_of_two_devices_counts_once(groups: list[Group]) -> None:
    gloo = Counting(3)
    groups += [Group(cpu=gloo, cuda=gloo), ignored := Group(cpu=Counting(7))]
    assert collectives_issued(ignored) == 3


def test_a_backend_that_does_not_count_leaves_the_number_open(groups: list[Group]) -> None:
    groups.append(Group(cpu=Counting(3), cuda=Uncounted()))
    assert collectives_issued() is None


def test_torchs_own_groups_are_counted(tmp_path: Any) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        before = collectives_issued()
        distributed.all_reduce(torch.ones(1))
        assert before is not None
        assert collectives_issued() == before + 1
    finally:
        distributed.destroy_process_group()
