"""Which slices of an optimizer's parameters are stepped together, and float32 scratch memory for them.

An optimizer that treats every element alike steps a large parameter in slices, so that the float32
temporaries of a step are bounded by a constant, and on a CPU stay in its cache.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, repeat
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_memkit.optim.blocks import flat_views, local_part, quick_reads
from lightning_memkit.optim.methods import SLOTS, combines_over_the_model
from lightning_memkit.optim.quantised import plain_name, row_length
from lightning_memkit.utilities.tensors import is_wrapper

# Fixed sizes, so that a slice always starts at the same element, on which the rounding noise depends.
PIECE_ELEMENTS_CPU = 1 << 19
PIECE_ELEMENTS_ACCELERATOR = 1 << 24
BYTES_IN_FLIGHT = 16  # float32 weight, gradient and two moments of one parameter

_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in ("SGD Adam AdamW NAdam RAdam Adamax Adagrad Adadelta RMSprop Rprop ASGD".split())
)


class Slot(NamedTuple):
    """A parameter's position: its group, its place in the group, and its index over all groups."""

    group: int
    place: int
    index: int
    parameter: Parameter


@dataclass(frozen=True)
class Piece:
    """The elements of a parameter that are stepped at once: all of them, or a contiguous slice in storage order."""

    slot: Slot
    start: int
    stop: int
    whole: bool
    last: bool

    def view(self, tensor: Tensor) -> Tensor:
        """The slice of a tensor that has the parameter's shape; shares its memory."""
        return tensor if self.whole else tensor.detach().view(-1)[self.start : self.stop]


def slots(optimizer: Optimizer) -> Iterator[Slot]:
    """All parameters of an optimizer in order; groups added later come last, so earlier indices stay valid."""
    index = 0
    for group_index, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            yield Slot(group_index, place, index, parameter)
            index += 1


def slots_of_step(optimizer: Optimizer) -> list[Slot]:
    """As `slots`, for every step: a list not to be changed, made anew where groups have other parameters.

    It is kept on the optimizer, with which it goes; the undo of a replaced step removes it.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    sizes, parameters = list(map(len, groups)), list(chain.from_iterable(groups))
    known_sizes, known_parameters, known = vars(optimizer).get(SLOTS, ([], [], []))
    if sizes != known_sizes or not all(map(is_, parameters, known_parameters)):
        known = list(slots(optimizer))
        vars(optimizer)[SLOTS] = sizes, parameters, known
    return known


def with_gradients(every: list[Slot]) -> list[Slot]:
    """Those whose parameters have gradients; the same list if all have."""
    with quick_reads():
        missing = list(map(is_, [slot.parameter.grad for slot in every], repeat(None)))
    return (
        [slot for slot, misses in zip(every, missing, strict=True) if not misses] if any(missing) else every
    )


def is_compensated(parameter: Tensor) -> bool:
    """Whether the engine steps a parameter on a shadow; other dtypes are stepped as they are."""
    return parameter.dtype == torch.bfloat16


def buckets_of(
    optimizer: Optimizer, stepped: list[Slot], bucket_bytes: int | None, *, in_8_bits: bool = False
) -> Iterator[list[Piece]]:
    """Slices to be stepped together: at most one of each parameter, within ``bucket_bytes`` unless it is the only one.

    Optimizers that are known to combine values over the whole model get all of it in one bucket. Where states are, or
    become, 8-bit, slices are whole rows.
    """
    bucket: list[Piece] = []
    size = 0
    elementwise = type(optimizer) in _ELEMENTWISE
    whole_model = combines_over_the_model(optimizer)
    for slot in stepped:
        most = piece_elements(slot.parameter.device)
        limit = BYTES_IN_FLIGHT * most if bucket_bytes is None else bucket_bytes
        most -= most % _unit(optimizer, slot.parameter, in_8_bits)
        for piece in _pieces(slot, most, elementwise and _is_sliceable(optimizer, slot.parameter)):
            piece_bytes = BYTES_IN_FLIGHT * (piece.stop - piece.start)
            full = size + piece_bytes > limit and not whole_model
            if bucket and (full or bucket[-1].slot is slot):
                yield bucket
                bucket, size = [], 0
            bucket.append(piece)
            size += piece_bytes
    if bucket:
        yield bucket


def buckets_within(
    every: Iterable[Slot], bytes_of: Callable[[Slot], int], most_bytes: int
) -> Iterator[list[Slot]]:
    """Parameters in order, in buckets of at most so many bytes; one that has more is a bucket of its own."""
    bucket: list[Slot] = []
    size = 0
    for slot in every:
        slot_bytes = bytes_of(slot)
        if bucket and size + slot_bytes > most_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(slot)
        size += slot_bytes
    if bucket:
        yield bucket


def _pieces(slot: Slot, most: int, sliceable: bool) -> Iterator[Piece]:
    count = local_part(slot.parameter).numel()
    if not sliceable or not 0 < most < count:
        yield Piece(slot, 0, count, whole=True, last=True)
        return
    for start in range(0, count, most):
        stop = min(start + most, count)
        yield Piece(slot, start, stop, whole=False, last=stop == count)


def _unit(optimizer: Optimizer, parameter: Parameter, in_8_bits: bool) -> int:
    """What the elements of a slice are a multiple of."""
    state = optimizer.state[parameter] if parameter in optimizer.state else {}
    return row_length(parameter) or 1 if in_8_bits or any(plain_name(str(name)) for name in state) else 1


def _is_sliceable(optimizer: Optimizer, parameter: Parameter) -> bool:
    state = optimizer.state[parameter] if parameter in optimizer.state else {}
    alike = [
        value for value in state.values() if isinstance(value, Tensor) and value.shape == parameter.shape
    ]
    tensors = [parameter, parameter.grad, *alike]
    return all(t is not None and not hasattr(t, "to_local") and t.is_contiguous() for t in tensors)


def piece_elements(device: torch.device) -> int:
    """The most elements of a slice on a device."""
    return PIECE_ELEMENTS_CPU if device.type == "cpu" else PIECE_ELEMENTS_ACCELERATOR


class Scratch:
    """Float32 memory that the buckets of one step use in turn.

    On a CPU, fresh memory costs a page fault every 4 KiB, more than the arithmetic done in it. On other
    devices torch's caching allocator does the same job.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._used = 0

    def begin_bucket(self, bucket: list[Piece]) -> None:
        """Reclaim all memory, and make room for the slices of a bucket."""
        self._used = 0
        on_cpu = [piece.stop - piece.start for piece in bucket if piece.slot.parameter.device.type == "cpu"]
        need = BYTES_IN_FLIGHT // 4 * sum(count + 16 for count in on_cpu)
        if need and (self._memory is None or self._memory.numel() < need):
            self._memory = None  # free the old memory before allocating more
            self._memory = torch.empty(need, dtype=torch.float32)

    def like(self, tensor: Tensor) -> Tensor:
        """An uninitialized float32 tensor with a tensor's shape and strides, valid until the next bucket."""
        count = tensor.numel()
        fits = self._memory is not None and self._used + count <= self._memory.numel()
        plain = tensor.device.type == "cpu" and not hasattr(tensor, "to_local")
        if not (fits and plain) or flat_views(tensor) is None:
            return torch.empty_like(tensor.detach(), dtype=torch.float32)
        assert self._memory is not None
        start, self._used = self._used, self._used + -(-count // 16) * 16  # round up to whole cache lines
        return self._memory.as_strided(tensor.shape, tensor.stride(), start)

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the scratch memory and so must not be kept."""
        if self._memory is None or is_wrapper(tensor):  # DTensors, torchao's states
            return False
        return tensor.untyped_storage()._cdata == self._memory.untyped_storage()._cdata
