"""Simulate one rank of many: torch's own data-parallel code on a process group without other ranks.

FSDP2 and ZeRO-1 run unchanged on fake tensors, over the process group "fake" of torch's own tests, whose
collectives return immediately. DDP's reducer is C++ that can't handle fake tensors: `buckets.py` replaces it.
Streams: FSDP2 keeps references to its buffers by the same code on CPU and CUDA
(`FSDPParamGroup.wait_for_unshard` and `post_backward`: the last all-gather's output until the next copy-out,
one reduce-scatter's input until the next one), so what is alive at once does not depend on the device. What
is reserved does: CUDA's allocator keeps blocks for the stream for which they were made, and FSDP2 gathers and
reduces in streams of its own, which it also sets on the CPU. NCCL's own buffers are outside of torch's
allocator and not counted.
"""

import importlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only
from typing_extensions import Self

from lightning_memkit.memory.meter import tensors_in, unmetered
from lightning_memkit.prediction.devices import Device
from lightning_memkit.prediction.host_shards import host_shards
from lightning_memkit.prediction.replaced import replaced
from lightning_memkit.prediction.result import Prediction
from lightning_memkit.prediction.simulation import Simulation
from lightning_memkit.utilities.errors import PredictionError

_c10d = torch.ops.c10d
# The argument of which gloo (`ProcessGroupGloo.cpp`) makes a flat copy during a collective; NCCL makes none.
_GLOO_COPIES = {_c10d._allgather_base_: 0, _c10d.allgather_: 0, _c10d._reduce_scatter_base_: 1}


class RankSimulation(Simulation):
    """A `Simulation` of the rank that holds the most; costs as much as one device's, plus the sharding.

    Args:
        ranks: how many there are, on all nodes.
        device: as for `Simulation`.
    """

    def __init__(self, ranks: int, device: Device | None = None) -> None:
        super().__init__(device)
        self.ranks = ranks
        self._world = ExitStack()
        self._default = torch.cpu.current_stream()
        self._streams: dict[Any, int] = {}

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(_process_group(self.ranks))
            stack.enter_context(_objects_stay_here())
            stack.enter_context(_meshes_of_integers(self))
            stack.enter_context(_largest_share_first())
            stack.enter_context(_first_shard_alone())
            stack.enter_context(_resizes_noted(self))
            stack.enter_context(_fsdp_buffers_named(self))
            if self._device is not None:
                stack.enter_context(host_shards(self.host))
            super().__enter__()
            self._world = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._world.close()

    def take(self, module: nn.Module) -> None:
        """As `Simulation.take`, but whole weights are freed when they are sharded."""
        super().take(module)
        self.fakes.forget_twins()

    def begin_training(self, module: nn.Module) -> None:
        """Discard the set-up except live tensors: whole weights were on the host until they were sharded."""
        self._forget_setup()
        if self.host.has_shards:
            self._device_steps.close()  # the CPU steps offloaded shards
        self.watch(module)

    def result(self) -> Prediction:
        """The prediction from what was counted."""
        return replace(super().result(), ranks=self.ranks)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for kind in types:
            if kind is not FakeTensor and issubclass(kind, DTensor):
                return NotImplemented  # DTensor dispatches first; its operators on local shards are counted
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _count(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        # FSDP2 also sets its streams on the CPU, where they have no effect.
        stream = torch.cpu.current_stream()
        self.stream = (
            0 if stream is self._default else self._streams.setdefault(stream, 1 + len(self._streams))
        )
        if self._is_the_hosts([*args, *kwargs.values()]):
            count = super()._count
            return self.host.room(lambda: count(func, args, kwargs), is_pinned=False, of_shards=True)
        out = super()._count(func, args, kwargs)
        if func.namespace == "c10d" and self._device is None:
            copied = _copied_by_gloo(func, args)
            if copied:
                self._pass_through(copied, str(func))
                self._reach(self.live_bytes + copied)
        return out

    def _is_the_hosts(self, arguments: list[Any]) -> bool:
        """Whether the CPU computes: on offloaded shards (and scalars), or tensors for their step."""
        if not self.host.has_shards:
            return False
        found = [tensor for tensor in tensors_in(arguments) if tensor.dim()]
        if found:
            return all(self.host.has(tensor) for tensor in found)
        return self.phase == "optimizer" and not torch.is_grad_enabled()  # if enabled, its closure runs

    @contextmanager
    def communicating(self) -> Iterator[None]:
        """Within the context, allocations count as communication."""
        before, self.category = self.category, "communication"
        try:
            yield
        finally:
            self.category = before


def _copied_by_gloo(func: Any, args: Any) -> int:
    """Bytes of the flat copy that gloo's collectives make of their gathered output or unreduced input."""
    copied = _GLOO_COPIES.get(func.overloadpacket)
    return 0 if copied is None else sum(tensor.nbytes for tensor in tensors_in(args[copied]))


@contextmanager
def _process_group(ranks: int) -> Iterator[None]:
    """Rank 0 of a process group whose other ranks don't exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # Registers collectives for fake tensors in torch 2.10; newer versions have them anyway.
    importlib.import_module("torch.distributed._tools.fake_collectives")
    if distributed.is_initialized():
        raise PredictionError(
            "This process is a rank of a process group already: predict many ranks before the training starts, or in "
            "a process of its own."
        )
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        with unmetered():
            distributed.destroy_process_group()


@contextmanager
def _objects_stay_here() -> Iterator[None]:
    """Make collectives of Python objects return this rank's: pickled bytes have no values on fake tensors."""

    def all_gather_object(object_list: list[Any], obj: Any, *_: Any, **__: Any) -> None:
        object_list[:] = [obj] * len(object_list)

    def gather_object(obj: Any, object_gather_list: list[Any] | None = None, *_: Any, **__: Any) -> None:
        if object_gather_list is not None:
            object_gather_list[:] = [obj] * len(object_gather_list)

    def nothing(*_: Any, **__: Any) -> None:
        return None

    with replaced(
        distributed,
        broadcast_object_list=nothing,
        barrier=nothing,
        monitored_barrier=nothing,
        all_gather_object=all_gather_object,
        gather_object=gather_object,
    ):
        yield


@contextmanager
def _meshes_of_integers(simulation: Simulation) -> Iterator[None]:
    """Make device meshes from real integers, because their values are needed."""

    def real(tensor: Tensor) -> Tensor:
        known = simulation.values.of(tensor) if isinstance(tensor, FakeTensor) else tensor
        return tensor if known is None else known

    def unwatched(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = tree_map_only(Tensor, real, (args, kwargs))
            with unmetered():
                return function(*args, **kwargs)

        return run

    names = ("__init__", "__getitem__", "_flatten", "_unflatten")
    methods = {name: unwatched(getattr(DeviceMesh, name)) for name in names if hasattr(DeviceMesh, name)}
    # DTensor infers a result's shape by running the operator on whole fake tensors, which no rank has: don't
    # count these.
    tell = "_propagate_tensor_meta_non_cached"
    shapes = {tell: unwatched(getattr(ShardingPropagator, tell))} if hasattr(ShardingPropagator, tell) else {}
    with replaced(DeviceMesh, **methods), replaced(ShardingPropagator, **shapes):
        yield


@contextmanager
def _resizes_noted(simulation: Simulation) -> Iterator[None]:
    """Record when FSDP2 frees gathered weights by resizing their storage, which bypasses the dispatcher."""
    plain = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        out = plain(self, size)
        simulation.resized(self)
        return out

    torch.UntypedStorage.resize_ = resize_  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        del torch.UntypedStorage.resize_


@contextmanager
def _fsdp_buffers_named(simulation: RankSimulation) -> Iterator[None]:
    """Count FSDP2's gathered weights and collective buffers as communication, whole gradients as such."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups

    def named(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with simulation.communicating():
                return function(*args, **kwargs)

        return run

    def reduce(params: Any, gradients: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        simulation.track(gradients, "gradients")
        with simulation.communicating():
            return plain_reduce(params, gradients, *args, **kwargs)

    plain_reduce: Any = groups.foreach_reduce
    with replaced(
        groups,
        foreach_all_gather=named(groups.foreach_all_gather),
        foreach_all_gather_copy_out=named(groups.foreach_all_gather_copy_out),
        foreach_reduce=reduce,
    ):
        yield


def zero_redundancy_optimizer() -> type[Optimizer]:
    """Torch's class for ZeRO-1. The first call imports it: call this before forks, or each imports it by itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch itself uses what it deprecates
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer


@contextmanager
def _largest_share_first() -> Iterator[None]:
    """Give rank 0 of ZeRO-1 the shard whose optimizer states take the most."""
    zero: Any = zero_redundancy_optimizer()
    plain = zero._partition_parameters

    def partition(self: Any, params_per_rank: list[list[Tensor]] | None = None) -> list[list[dict[str, Any]]]:
        fresh = not self._partition_parameters_cache
        shares = plain(self, params_per_rank)
        if fresh:
            shares.sort(key=_bytes_of, reverse=True)
        return shares

    with replaced(zero, _partition_parameters=partition):
        yield


@contextmanager
def _first_shard_alone() -> Iterator[None]:
    """Let FSDP2 cut the shard of rank 0 alone out of each weight: the others' are views that nothing looks at."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param as sharded

    def first(tensor: Tensor, num_chunks: int, dim: int) -> list[Tensor]:
        size = tensor.shape[dim]
        return [tensor.narrow(dim, 0, min(size, -(-size // num_chunks)))] * num_chunks

    with replaced(sharded, _chunk_with_empty=first):
        yield


def _bytes_of(groups: Iterable[dict[str, Any]]) -> int:
    return sum(parameter.nbytes for group in groups for parameter in tensors_in(group["params"]))
