"""What is offloaded from a GPU that is not there: host memory that takes nothing of the device.

memkit's offloads do nothing for tensors on a CPU, where those of a simulation are. Within `offloads` they run the code
that they run on a GPU: what they allocate on the host is the host's from then on, and their streams and events order
nothing, since a simulation counts in the order of the host's calls. So does CUDA's allocator.
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

_ENOUGH = 1 << 60  # bytes: the host that the GPU will be in is not this one
_ALL_OFFLOADED = "blocks that are chosen by time are offloaded, as they are in the first three steps"


class PredictedHostMemory:
    """Storages that are the host's, and how many bytes they take.

    Attributes:
        live_bytes: what they take now.
        peak_bytes: what they took at most.
        peak_content_bytes: what they held at most, without rounding.
        has_shards: whether weights are there, which the CPU steps.
    """

    def __init__(self) -> None:
        self.live_bytes = self.peak_bytes = 0
        self.peak_content_bytes = self._content_bytes = 0
        self.has_shards = False
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._is_asked = self._is_pinned = False

    def room(self, make: Callable[[], Tensor], *, is_pinned: bool) -> Tensor:
        """A tensor that is made in host memory; pinned, it takes a power of two."""
        before = self._is_asked, self._is_pinned
        self._is_asked, self._is_pinned = True, is_pinned
        try:
            return make()
        finally:
            self._is_asked, self._is_pinned = before

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor is in host memory."""
        return tensor.untyped_storage()._cdata in self._storages

    def takes(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage is the host's: it was, or it is made within `room`."""
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages or not self._is_asked:
            return key in self._storages
        taken = pinned_size(size) if self._is_pinned else size

        def give_back(_: Any) -> None:
            del self._storages[key]
            self.live_bytes -= taken
            self._content_bytes -= size

        self._storages[key] = weakref.ref(storage, give_back)
        self.live_bytes += taken
        self._content_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.peak_content_bytes = max(self.peak_content_bytes, self._content_bytes)
        return True


class _InOrder:
    """A stream and its events: everything is done when it is asked for."""

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
    """How activations are known."""

    def twin(self, real: Tensor) -> Tensor:
        """The fake tensor that stands for a saved one."""
        ...

    def marking(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose allocations are saved activations."""
        ...


@contextmanager
def offloads(host: PredictedHostMemory, saved: "Saved", assumed: dict[str, str]) -> Iterator[None]:
    """Within it the offloads of states and of activations work on fake tensors as on a GPU's.

    Args:
        host: where their host memory is counted.
        saved: how activations are known.
        assumed: takes what had to be assumed.
    """
    in_order, plain_pack = _InOrder(), Traffic._pack

    def pack(traffic: Traffic, tensor: Tensor, *args: Any) -> Any:
        return plain_pack(traffic, saved.twin(tensor), *args)  # of the batch

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
