"""Ranks whose device is "fake": collectives go through gloo, on the memory itself, which is the host's.

Collectives that C++ starts by itself (`DTensor.full_tensor`, clipping of sharded gradients) don't find it.
"""

import ctypes
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, distributed

from tests.plugins.fake_accelerator import FakeAccelerator

BACKEND = "relay"


class Relay(distributed.ProcessGroup):
    """Gloo for tensors of the device "fake" and of the CPU; a collective is over when its call returns."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]
        own = distributed.PrefixStore(BACKEND, store)  # a group of gloo may have been there before
        self.gloo: Any = distributed.ProcessGroupGloo(own, rank, size, timeout)
        self._name = ""

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return BACKEND

    def _get_backend(self, device: torch.device) -> Any:
        return self.gloo

    @property
    def pg_name(self) -> str:
        return self._name

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name


def _relayed(name: str) -> Any:
    def collective(self: Relay, *arguments: Any, **options: Any) -> Any:
        work = getattr(self.gloo, name)(*(on_host(argument) for argument in arguments), **options)
        work.wait()
        return work

    return collective


# Of torch's names for a collective, gloo's own.
_NAMES = {
    name: name for name in ("allreduce", "allgather", "broadcast", "gather", "scatter", "reduce", "barrier")
}
_NAMES |= {name: "_allgather_base" for name in ("_allgather_base", "all_gather_single")}
_NAMES |= {name: "_reduce_scatter_base" for name in ("_reduce_scatter_base", "reduce_scatter_single")}
_NAMES |= {name: "alltoall_base" for name in ("alltoall_base", "all_to_all_single")}
for _name, _of_gloo in _NAMES.items():
    setattr(Relay, _name, _relayed(_of_gloo))


def on_host(value: Any) -> Any:
    """The same memory as tensors of the CPU."""
    if isinstance(value, (list, tuple)):
        return [on_host(one) for one in value]
    if not isinstance(value, Tensor) or value.device.type != "fake":
        return value
    assert value.is_contiguous()
    if not value.numel():
        return torch.empty(value.shape, dtype=value.dtype)
    memory = (ctypes.c_char * (value.numel() * value.element_size())).from_address(value.data_ptr())
    return torch.frombuffer(memory, dtype=value.dtype).view(value.shape)


class OneOfEachRank(FakeAccelerator):
    """Each rank's process has one device of its own."""

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        return [torch.device("fake", 0)] * devices


def on_fake_ranks(ranks: int) -> dict[str, Any]:
    """Trainer arguments, for a strategy with `process_group_backend=BACKEND`; the device must have been loaded."""
    if BACKEND not in distributed.Backend.backend_list:
        distributed.Backend.register_backend(BACKEND, Relay, devices=["cpu", "fake"])
    module: Any = torch.get_device_module("fake")
    module.Stream = lambda *_, **__: torch.Stream("fake")  # what FSDP2 asks of a device
    module.Event = lambda *_, **__: torch.Event("fake")
    # Lightning takes whatever is no CPU for CUDA there.
    DDPStrategy.determine_ddp_device_ids = lambda self: None
    return {"accelerator": OneOfEachRank(), "devices": ranks}
