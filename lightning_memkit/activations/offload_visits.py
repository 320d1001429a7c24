"""Copies what each block saves to the host, and back one block ahead of its backward.

One run of a block in the forward is a visit. When it ends, the device memory of the previous visit's tensors
is freed; so the tensors that the backward needs first never leave. The visit with which the previous pass ended is
not copied at all in this one, unless another visit follows it. In the backward, the first use of a
visit's tensors starts the copies of the visit before it.
"""

import warnings
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_memkit.activations.offload_parameters import Weights, stored_weights
from lightning_memkit.activations.offload_parcels import Lane, Parcel
from lightning_memkit.activations.offload_pool import HostPool
from lightning_memkit.activations.recorded import is_plain
from lightning_memkit.memory.units import format_bytes
from lightning_memkit.utilities.errors import NoEffectWarning

_HOST_MEMORY = ("cpu", "mps", "meta")  # Apple's GPU computes in the host's memory
_MOVABLE: tuple[type, ...] = (Tensor, nn.Parameter)  # wrappers have their storages elsewhere
# A view of less than an eighth of its storage stays, because the whole storage would be copied.
_LARGEST_SHARE = 8
_RECENT = 3  # visits whose tensors stay on the device during a backward that retains its graph


@dataclass(frozen=True, kw_only=True)
class OffloadCounts:
    """What an offload has done so far.

    Args:
        visits: runs of blocks with gradients enabled.
        moved_bytes: bytes copied to the host.
        kept_bytes: bytes of tensors that were large enough but stayed on the device because the host had no
            room.
        host_bytes: bytes of host memory held now, in use or for the next step.
    """

    visits: int
    moved_bytes: int
    kept_bytes: int
    host_bytes: int


@dataclass(slots=True)
class _KeptActivation:
    """A saved tensor that stays on the device, with its version: autograd checks none where hooks are set."""

    tensor: Tensor
    version: int


@dataclass(slots=True)
class _Ticket:
    """A saved tensor whose bytes are in a parcel."""

    parcel: Parcel
    visit: "_Visit"
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Visit:
    """The tensors that one run of a block has saved; lives as long as autograd keeps any of them."""

    def __init__(self, previous: "weakref.ref[_Visit] | None") -> None:
        self.previous = previous
        self.weights: Weights | None = None
        self._parcels: list[weakref.ref[Parcel]] = []

    @property
    def parcels(self) -> list[Parcel]:
        """The parcels that are still needed, in the order in which they were saved."""
        return [parcel for ref in self._parcels if (parcel := ref()) is not None]

    def add(self, parcel: Parcel) -> None:
        self._parcels.append(weakref.ref(parcel))

    def bring(self) -> None:
        """Start the copies to the device in the order of use. Parcels without room are copied when needed."""
        for parcel in reversed(self.parcels):
            try:
                parcel.bring()
            except torch.OutOfMemoryError:
                return


class Traffic:
    """The saved-tensor hooks for the blocks of one model.

    Args:
        root: the model, whose parameters and buffers never move.
        pool: the host memory.
        min_bytes: smaller storages stay on the device.
    """

    def __init__(self, root: nn.Module, pool: HostPool, min_bytes: int) -> None:
        self.visits = 0
        self.passes = 0
        self.stood_aside = False
        self.moved_bytes = 0
        self.kept_bytes = 0
        self._root = weakref.ref(root)
        self._pool = pool
        self._min_bytes = min_bytes
        self._lanes: dict[torch.device, Lane] = {}
        self._visits_before = self._visits_now = 0  # of the last complete pass, and of this one
        self._known: weakref.WeakValueDictionary[int, Parcel] = weakref.WeakValueDictionary()  # by storage
        self._elsewhere: set[int] = set()
        self._latest: weakref.ref[_Visit] | None = None  # the last one in the forward
        self._recent: deque[weakref.ref[_Visit]] = deque()  # the last ones in the backward
        self._said: set[str] = set()
        # Autograd runs one thread for each device.
        self._lock = RLock()

    @property
    def counts(self) -> OffloadCounts:
        """The counts so far."""
        return OffloadCounts(
            visits=self.visits,
            moved_bytes=self.moved_bytes,
            kept_bytes=self.kept_bytes,
            host_bytes=self._pool.held_bytes,
        )

    @property
    def device(self) -> torch.device | None:
        """A device from which something was moved; None if nothing was."""
        return next(iter(self._lanes), None)

    @contextmanager
    def visit(self, block: nn.Module) -> Iterator[None]:
        """Run a block's forward; large tensors saved within are copied to the host."""
        if _hooks_are_set():
            self.stood_aside = True
            self.visits += 1
            self._say(
                f"{type(block).__name__} runs within other saved-tensor hooks (a checkpoint around it, save_on_cpu), "
                "which keep its activations their own way: none is offloaded. In place of a "
                "checkpoint around the block write checkpoint_modules (in Lightning ActivationCheckpointing).",
            )
            yield
            return
        before = None if self._latest is None else self._latest()
        visit = _Visit(self._latest if before is not None else None)
        if before is None:  # a new pass: parameters may have moved since
            self.passes += 1
            self._visits_before, self._visits_now = self._visits_now, 0
            self._pool.begin_pass()
            root = self._root()
            self._elsewhere = set() if root is None else stored_weights(root)
        self.visits += 1
        self._visits_now += 1

        def pack(tensor: Tensor) -> _KeptActivation | _Ticket:
            with self._lock:
                return self._pack(tensor, visit, block)

        with saved_tensors_hooks(pack, self._unpack):
            yield
        visit.weights = None
        if visit.parcels:
            self._let_go(before)
            self._latest = weakref.ref(visit)

    def _let_go(self, visit: _Visit | None) -> None:
        with self._lock:
            for parcel in visit.parcels if visit is not None else ():
                if parcel.is_sent or self._send(parcel):
                    parcel.park()

    def _pack(self, tensor: Tensor, visit: _Visit, block: nn.Module) -> _KeptActivation | _Ticket:
        parcel = self._parcel(tensor, visit, block) if self._may_move(tensor) else None
        if parcel is None:
            # detached, because a reference to an input's history would be a cycle
            return _KeptActivation(tensor.detach() if tensor.requires_grad else tensor, tensor._version)
        visit.add(parcel)
        return _Ticket(
            parcel, visit, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())
        )

    def _may_move(self, tensor: Tensor) -> bool:
        if type(tensor) not in _MOVABLE or not is_plain(tensor):
            return False
        size = tensor.untyped_storage().nbytes()
        if size < self._min_bytes or size > _LARGEST_SHARE * tensor.nbytes:
            return False
        if in_host_memory(tensor.device):
            if tensor.device.type != "meta":
                self._say(
                    f"Activations on {tensor.device.type} are in the host's memory already, so offloading them saves "
                    "nothing and none is moved; to keep fewer, write checkpoint_modules (in Lightning "
                    "ActivationCheckpointing) instead."
                )
            return False
        return not (tensor.is_conj() or tensor.is_neg())

    def _parcel(self, tensor: Tensor, visit: _Visit, block: nn.Module) -> Parcel | None:
        if visit.weights is None:
            visit.weights = Weights(block, self._elsewhere)
        if visit.weights.has(tensor):
            return None
        storage = tensor.untyped_storage()
        parcel = self._known.get(storage._cdata)
        if parcel is not None and parcel.is_of(tensor):
            return parcel
        if tensor.device not in self._lanes:
            self._lanes[tensor.device] = Lane(tensor.device)
        parcel = Parcel(tensor, self._pool, self._lanes[tensor.device])
        if self._visits_now != self._visits_before and not self._send(parcel):
            return None
        self._known[storage._cdata] = parcel
        return parcel

    def _send(self, parcel: Parcel) -> bool:
        """Start a parcel's copy to the host; False if that has no room."""
        buffer = self._pool.take(parcel.nbytes)
        if buffer is None:
            self.kept_bytes += parcel.nbytes
            self._say(
                f"The host has no room for more activations: {format_bytes(self._pool.held_bytes)} of "
                f"{format_bytes(self._pool.limit_bytes)} are in use, and what goes beyond stays on the device. "
                "Raise host_bytes, or make room on the host.",
                UserWarning,
            )
            return False
        parcel.send(buffer)
        self.moved_bytes += parcel.nbytes
        return True

    def _unpack(self, saved: _KeptActivation | _Ticket) -> Tensor:
        if isinstance(saved, _KeptActivation):
            if saved.tensor._version != saved.version:
                raise _modified(saved.tensor.shape)
            return saved.tensor
        with self._lock:
            self._arrive(saved.visit)
            storage = saved.parcel.storage()
            if saved.parcel.modified:
                raise _modified(saved.size)
            empty = torch.empty(0, dtype=saved.dtype, device=saved.parcel.device)
            return empty.set_(storage, saved.offset, saved.size, saved.stride)  # pyright: ignore[reportArgumentType]

    def _arrive(self, visit: _Visit) -> None:
        """The backward has reached a visit: bring the one before it."""
        if self._recent and self._recent[-1]() is visit:
            return
        self._recent.append(weakref.ref(visit))
        visit.bring()
        ahead = None if visit.previous is None else visit.previous()
        if ahead is not None:
            ahead.bring()
        if len(self._recent) > _RECENT:
            left = self._recent.popleft()()
            if left is not None:  # the graph is retained for another backward
                near = {parcel for ref in self._recent if (v := ref()) is not None for parcel in v.parcels}
                near.update(ahead.parcels if ahead is not None else ())
                for parcel in left.parcels:
                    if parcel not in near:
                        parcel.park()

    def _say(self, message: str, category: type[Warning] = NoEffectWarning) -> None:
        kind = message[:20]
        if kind not in self._said:
            self._said.add(kind)
            warnings.warn(message, category, stacklevel=5)


def in_host_memory(device: torch.device) -> bool:
    """Whether a device computes in the host's memory, so that moving tensors there saves nothing."""
    return device.type in _HOST_MEMORY


def _hooks_are_set() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None  # pyright: ignore


def _modified(shape: torch.Size) -> RuntimeError:
    return RuntimeError(
        "One of the variables needed for gradient computation has been modified by an inplace operation: a saved "
        f"tensor of shape {list(shape)}. Write the operation out of place, or clone the tensor before it."
    )
