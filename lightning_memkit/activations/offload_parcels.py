"""The bytes of one storage, copied between device and host on separate streams."""

import weakref

import torch
from torch import Tensor

from lightning_memkit.activations.offload_pool import HostBuffer, HostPool


class Lane:
    """A device's two copy streams: to the host and back."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.outward = torch.Stream(device)
        self.inward = torch.Stream(device)


class Parcel:
    """One storage, copied to the host once, whatever the number of saved views; lives as long as these.

    It starts with the storage on the device. `send` starts the copy to the host, `park` frees the device's side,
    `bring` starts the copy back.

    Args:
        tensor: any tensor with the storage.
        pool: the pool of its host memory.
        lane: the copy streams of the tensor's device.
    """

    def __init__(self, tensor: Tensor, pool: HostPool, lane: Lane) -> None:
        self._buffer: HostBuffer | None = None
        storage = tensor.untyped_storage()
        self.nbytes = storage.nbytes()
        self.modified = False
        self._storage = weakref.ref(storage)
        self._version = tensor._version
        self._pool = pool
        self._lane = lane
        # The device's side: an alias of the saved tensor, which shares its version counter, or a copy brought
        # back.
        self._resident: Tensor | None = tensor.detach()
        self._is_original = True
        self._stream = _current_stream(lane.device)
        # after the last copy that read or wrote either side
        self._copied: torch.Event | None = None

    def send(self, buffer: HostBuffer) -> None:
        """Start the copy to the host.

        Args:
            buffer: at least as large as the storage; goes back to the pool when the parcel is deleted.
        """
        assert self._resident is not None
        lane, self._buffer = self._lane, buffer
        lane.outward.wait_stream(_current_stream(lane.device))
        if buffer.free_after is not None:
            lane.outward.wait_event(buffer.free_after)
        with lane.outward:
            self._host.copy_(_flat(self._resident.untyped_storage(), lane.device), non_blocking=True)
        self._copied = lane.outward.record_event()

    @property
    def is_sent(self) -> bool:
        """Whether the host has the bytes, or is about to."""
        return self._copied is not None

    @property
    def device(self) -> torch.device:
        """The device that the storage comes from and returns to."""
        return self._lane.device

    @property
    def _host(self) -> Tensor:
        assert self._buffer is not None
        return self._buffer.bytes[: self.nbytes]

    def is_of(self, tensor: Tensor) -> bool:
        """Whether it holds the bytes of a tensor that is being saved."""
        return self._storage() is not None and self._version == tensor._version

    def park(self) -> None:
        """Free the device's side of what was sent. Its memory is reused only after the copy: the device waits."""
        if self._resident is None or self._copied is None:
            return
        self._note_changes()
        self._stream.wait_event(self._copied)
        self._resident = None

    def bring(self) -> None:
        """Start the copy back to the device, unless the bytes are there already.

        Raises:
            torch.OutOfMemoryError: the device has no room; nothing has changed.
        """
        if self._resident is not None:
            return
        lane = self._lane
        # The memory belongs to the current stream, which may still use its previous contents: the copy waits
        # for it.
        room = torch.empty(self.nbytes, dtype=torch.uint8, device=lane.device)
        self._stream = _current_stream(lane.device)
        lane.inward.wait_stream(self._stream)
        assert self._copied is not None  # only what was sent is parked
        lane.inward.wait_event(self._copied)
        with lane.inward:
            room.copy_(self._host, non_blocking=True)
        self._copied = lane.inward.record_event()
        self._resident, self._is_original = room, False

    def storage(self) -> torch.UntypedStorage:
        """The storage on the device; the current stream waits for its bytes."""
        self.bring()
        self._note_changes()
        assert self._resident is not None
        if not self._is_original:
            assert self._copied is not None
            _current_stream(self._lane.device).wait_event(self._copied)
        return self._resident.untyped_storage()

    def _note_changes(self) -> None:
        resident = self._resident
        if resident is not None and self._is_original and resident._version != self._version:
            self.modified = True

    def __del__(self) -> None:
        if self._buffer is None:
            return
        if self._copied is not None:  # else the first copy failed
            if self._resident is not None:
                self._stream.wait_event(self._copied)
            self._buffer.free_after = self._copied
        self._pool.give(self._buffer)


def _flat(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    """All bytes of a storage as one tensor."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)  # pyright: ignore[reportArgumentType]


def _current_stream(device: torch.device) -> torch.Stream:
    return torch.accelerator.current_stream(device)
