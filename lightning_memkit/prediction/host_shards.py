"""Simulate FSDP2's CPU offload without a GPU: shards on the host, gathered on the device, CPU steps.

With `CPUOffloadPolicy`, FSDP2 moves shards to the host when it makes them, copies them to the device when it
gathers, and moves reduced gradients to the host. In a simulation, device and host are the same device to
torch, so these copies don't happen; within `host_shards` they do.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_memkit.prediction.host_memory import PredictedHostMemory
from lightning_memkit.prediction.replaced import replaced

_Moved = Callable[[Tensor, bool], Tensor]  # from a tensor, and whether its host memory is pinned


@contextmanager
def host_shards(host: PredictedHostMemory) -> Iterator[None]:
    """Within the context, what FSDP2 offloads counts as host memory."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    def to_host(tensor: Tensor, is_pinned: bool) -> Tensor:
        host.has_shards = True
        if host.has(tensor):
            return tensor
        host.copied_bytes += tensor.nbytes
        return host.room(lambda: torch.empty_like(tensor), is_pinned=is_pinned, of_shards=True)

    def to_device(tensor: Tensor, is_pinned: bool) -> Tensor:
        if not host.has(tensor):
            return tensor
        host.copied_bytes += tensor.nbytes
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    def reduced(*args: Any, **kwargs: Any) -> Any:
        with _Moves(to_host, is_pinned=False):
            return plain_reduce(*args, **kwargs)

    def offloaded(function: Callable[..., Any], moved: _Moved) -> Callable[..., Any]:
        def run(parameter: Any, *args: Any, **kwargs: Any) -> Any:
            if not parameter.offload_to_cpu:
                return function(parameter, *args, **kwargs)
            with _Moves(moved, is_pinned=parameter.pin_memory):
                return function(parameter, *args, **kwargs)

        return run

    plain_reduce: Any = groups.foreach_reduce
    with ExitStack() as stack:
        for name in ("_init_sharded_param", "reset_sharded_param"):
            stack.enter_context(replaced(FSDPParam, **{name: offloaded(getattr(FSDPParam, name), to_host)}))
        gathered: Any = FSDPParam.all_gather_inputs
        inputs = property(offloaded(gathered.fget, to_device))
        stack.enter_context(replaced(FSDPParam, all_gather_inputs=inputs))
        stack.enter_context(replaced(groups, foreach_reduce=reduced))
        yield


class _Moves(TorchFunctionMode):
    """Makes the copies of `Tensor.to(device)` and `Tensor.cpu()` that torch skips with one device."""

    def __init__(self, moved: _Moved, *, is_pinned: bool) -> None:
        super().__init__()
        self._moved = moved
        self._is_pinned = is_pinned

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        to_a_device = any(isinstance(one, torch.device) for one in (*args[1:], *kwargs.values()))
        if func is Tensor.cpu or (func is Tensor.to and to_a_device):
            # On CUDA a non-blocking copy to the host is pinned.
            return self._moved(args[0], self._is_pinned or bool(kwargs.get("non_blocking")))
        if func is Tensor.pin_memory:
            return args[0]
        return func(*args, **kwargs)
