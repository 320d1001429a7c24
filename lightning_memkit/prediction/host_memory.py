"""Simulate offloading from a GPU that is not present: host memory that takes nothing of the device.

memkit's offloads do nothing for CPU tensors, which a simulation's tensors are. Within `offloads` they run the
code that they run on a GPU. What they allocate on the host is counted as host memory, and their streams and
events have no effect, since a simulation counts in the order of the host's calls, as CUDA's allocator does.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from typing_extensions import Self

from lightning_memkit.activations import offload, offload_parcels, offload_pool, offload_visits
from lightning_memkit.activations.offload_choice import Stopwatch
from lightning_memkit.activations.offload_parcels import Parcel
from lightning_memkit.activations.offload_visits import Traffic
from lightning_memkit.memory.pinned import pinned_size
from lightning_memkit.optim import offload as state_offload
from lightning_memkit.optim import state_home
from lightning_memkit.optim.state_home import StateHome
from lightning_memkit.prediction.replaced import replaced

_ENOUGH = 1 << 60  # bytes; the GPU's host is another machine with unknown memory
_ALL_OFFLOADED = "blocks that are chosen by time are offloaded, as they are in the first three steps"


class PredictedHostMemory:
    """The storages that are in host memory, and their bytes.

    Attributes:
        live_bytes: what they take now.
        peak_bytes: the most that they took.
        peak_content_bytes: the most that they held, without rounding.
        peak_apart_bytes: the same without shards, their gradients and states.
        copied_bytes: of shards to the device and of their gradients to the host, in the current step.
        has_shards: whether offloaded weights are among them, which the CPU steps.
    """

    def __init__(self) -> None:
        self.live_bytes = self.peak_bytes = self.copied_bytes = 0
        self.peak_content_bytes = self._content_bytes = 0
        self.peak_apart_bytes = self._shard_bytes = 0
        self.has_shards = self._of_shards = False
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._is_asked = self._is_pinned = False

    def room(self, make: Callable[[], Tensor], *, is_pinned: bool, of_shards: bool = False) -> Tensor:
        """Make a tensor in host memory; pinned, it takes a power of two."""
        before = self._is_asked, self._is_pinned, self._of_shards
        self._is_asked, self._is_pinned, self._of_shards = True, is_pinned, of_shards
        try:
            return make()
        finally:
            self._is_asked, self._is_pinned, self._of_shards = before

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor is in host memory."""
        return tensor.untyped_storage()._cdata in self._storages

    def takes(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage is in host memory: it was before, or it is being made within `room`."""
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages or not self._is_asked:
            return key in self._storages
        taken, of_shards = pinned_size(size) if self._is_pinned else size, size if self._of_shards else 0

        def give_back(_: Any) -> None:
            del self._storages[key]
            self.live_bytes -= taken
            self._content_bytes -= size
            self._shard_bytes -= of_shards

        self._storages[key] = weakref.ref(storage, give_back)
        self.live_bytes += taken
        self._content_bytes += size
        self._shard_bytes += of_shards
        self.peak_apart_bytes = max(self.peak_apart_bytes, self._content_bytes - self._shard_bytes)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.peak_content_bytes = max(self.peak_content_bytes, self._content_bytes)
        return True


class _InOrder:
    """A stream and its events, on which everything is done immediately."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self) -> Self:
        return self


class Saved(Protocol):
    """Marks saved activations."""

    def twin(self, real: Tensor) -> Tensor:
        """The fake tensor that represents a saved one."""
        ...

    def marking(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that its allocations count as saved activations."""
        ...


@contextmanager
def offloads(host: PredictedHostMemory, saved: "Saved", assumed: dict[str, str]) -> Iterator[None]:
    """Within the context, offloads of states and activations work on fake tensors as on a GPU's.

    Args:
        host: counts their host memory.
        saved: marks activations.
        assumed: collects assumptions.
    """
    in_order, plain_pack = _InOrder(), Traffic._pack

    def pack(traffic: Traffic, tensor: Tensor, *args: Any) -> Any:
        return plain_pack(traffic, saved.twin(tensor), *args)  # a saved tensor may belong to the real batch

    def state_room(like: Tensor, pin_memory: bool) -> Tensor:
        return host.room(lambda: torch.empty_like(like), is_pinned=pin_memory)

    def activation_room(size: int, pin_memory: bool) -> Tensor:
        return host.room(lambda: torch.empty(size, dtype=torch.uint8), is_pinned=pin_memory)

    def lane(device: torch.device) -> Any:
        return SimpleNamespace(device=device, outward=in_order, inward=in_order)

    def is_timed(stopwatch: Stopwatch, passes: int) -> bool:
        assumed.setdefault(_ALL_OFFLOADED, "ActivationOffload(choose='auto')")
        return False

    movable = (*offload_visits._MOVABLE, FakeTensor)
    with ExitStack() as stack:
        for owner, values in (
            (state_home, {"_HOST_MEMORY": (), "_host_room": state_room, "is_at_home": host.has}),
            (state_home, {"_current_stream": lambda device: in_order}),
            (StateHome, {"_streams_of": lambda home, device: (in_order, in_order)}),
            (state_offload, {"is_at_home": host.has}),
            (offload_pool, {"_host_room": activation_room, "return_pinned": lambda: None}),
            (state_offload, {"return_pinned": lambda: None}),
            (offload_visits, {"_HOST_MEMORY": ("meta",), "_MOVABLE": movable, "Lane": lane}),
            (offload_parcels, {"_current_stream": lambda device: in_order}),
            (Traffic, {"_pack": pack}),
            (Parcel, {"bring": saved.marking(Parcel.bring)}),
            (offload, {"host_limits": lambda: [SimpleNamespace(free_bytes=_ENOUGH)]}),
            (Stopwatch, {"wants": is_timed, "is_done": is_timed}),
        ):
            stack.enter_context(replaced(owner, **values))
        yield
