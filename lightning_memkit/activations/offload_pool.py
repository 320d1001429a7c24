"""Reusable pinned host buffers, with a limit on their total bytes."""

from collections import OrderedDict, deque
from collections.abc import Callable
from threading import RLock

import torch
from torch import Tensor

from lightning_memkit.memory.pinned import pinned_size, return_pinned

_CLASSES = 8  # sizes between two powers of two: an unpinned buffer is at most an eighth larger than requested
_LEAST_BYTES = 4096
_PASSES = 16  # a buffer that was not needed for this many passes in a row is freed


class HostBuffer:
    """Bytes of host memory, and the event after which they may be overwritten."""

    __slots__ = ("bytes", "free_after")

    def __init__(self, data: Tensor) -> None:
        self.bytes = data
        self.free_after: torch.Event | None = None


class HostPool:
    """Lends flat byte buffers and keeps them for reuse, because page-locking memory takes long.

    It never holds more than the most that was in use at once in the last passes: buffers of sizes that are no
    longer requested make room, and those of a larger batch (a trial's) are freed after a while. Pinned
    buffers are powers of two, as torch allocates them anyway; freed ones are returned to the system.

    Args:
        limit_bytes: the most bytes of host memory to use.
        pin_memory: use page-locked memory, without which copies can't overlap with computation.
        room_now: returns how many more bytes may be used now; called at most once a pass, and only when the
            limit is reached, because the memory of a container or a virtual machine may grow. None: the limit
            is fixed.
    """

    def __init__(
        self, limit_bytes: int, pin_memory: bool = True, room_now: Callable[[], int] | None = None
    ) -> None:
        self.limit_bytes = limit_bytes
        self._room_now = room_now
        self._may_ask = True
        self.pin_memory = pin_memory
        self.held_bytes = 0
        self.used_bytes = 0
        self._most_used: deque[int] = deque([0], maxlen=_PASSES)  # one entry a pass, the current one last
        self._closed = False
        # By id, the one that is idle for longest first.
        self._idle: OrderedDict[int, HostBuffer] = OrderedDict()
        self._lock = RLock()  # garbage collection may return a buffer while another one is taken

    def take(self, size_bytes: int) -> HostBuffer | None:
        """A buffer of at least this many bytes; None if the limit, or the host, has no room."""
        size = _rounded(size_bytes, self.pin_memory)
        with self._lock:
            found = next((b for b in reversed(self._idle.values()) if b.bytes.nbytes == size), None)
            if found is None:
                found = self._made(size)
            else:
                del self._idle[id(found)]
            if found is not None:
                self.used_bytes += size
                self._most_used[-1] = max(self._most_used[-1], self.used_bytes)
            return found

    def give(self, buffer: HostBuffer) -> None:
        """Return a buffer; it is overwritten only after its event."""
        with self._lock:
            self.used_bytes -= buffer.bytes.nbytes
            self._idle[id(buffer)] = buffer
            if self._closed:
                self._drop_idle(0)

    def begin_pass(self) -> None:
        """Begin a forward; the backwards of earlier ones are done."""
        with self._lock:
            self._most_used.append(self.used_bytes)
            self._may_ask = True
            self._drop_idle(max(self._most_used))

    def close(self) -> None:
        """Free idle buffers; buffers in use are freed when they are returned."""
        with self._lock:
            self._closed = True
            self._drop_idle(0)

    def _made(self, size: int) -> HostBuffer | None:
        if self.used_bytes + size > self.limit_bytes and self._room_now is not None and self._may_ask:
            self._may_ask = False
            self.limit_bytes = max(self.limit_bytes, self.held_bytes + self._room_now())
        if self.used_bytes + size > self.limit_bytes:
            return None
        self._drop_idle(min(max(*self._most_used, self.used_bytes + size), self.limit_bytes) - size)
        try:
            data = _host_room(size, self.pin_memory)
        except RuntimeError:  # no host memory, or none that may be page-locked
            return None
        self.held_bytes += size
        return HostBuffer(data)

    def _drop_idle(self, most_held: int) -> None:
        held_before = self.held_bytes
        while self._idle and self.held_bytes > most_held:
            self._drop(self._idle.popitem(last=False)[1])
        if self.pin_memory and self.held_bytes < held_before:
            return_pinned()

    def _drop(self, buffer: HostBuffer) -> None:
        if buffer.free_after is not None:
            buffer.free_after.synchronize()
        self.held_bytes -= buffer.bytes.nbytes
        buffer.bytes = buffer.bytes.new_empty(0)  # whoever returns it still refers to the buffer


def _host_room(size: int, pin_memory: bool) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=pin_memory)


def _rounded(size: int, is_pinned: bool) -> int:
    if is_pinned:
        return pinned_size(max(size, _LEAST_BYTES))
    step = max(_LEAST_BYTES, (1 << (size.bit_length() - 1)) // _CLASSES)
    return -(-size // step) * step
