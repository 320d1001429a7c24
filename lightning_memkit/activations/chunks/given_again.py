"""Arguments that a module in chunks gave: computed again, chunk by chunk, instead of kept."""

from collections.abc import Sequence

from torch import Tensor, nn

from lightning_memkit.activations.chunks.call import ChunkedCall, GivenInChunks
from lightning_memkit.activations.chunks.outputs import OutputPlace
from lightning_memkit.activations.chunks.units import may_be_sharded

_MARK = "_memkit_given_in_chunks"
# A module of so many times fewer weights costs little beside the one that reads what it gives.
_CHEAP = 4


def count_weights(module: nn.Module) -> int:
    """How many numbers a module's parameters have."""
    return sum(one.numel() for one in module.parameters())


def is_cheap_beside(weights: int, others: int) -> bool:
    """Whether a module of so many weights costs little beside one of so many others."""
    return weights * _CHEAP <= others


def mark_given(
    outputs: Sequence[Tensor], call: ChunkedCall, places: Sequence[OutputPlace], tensors: tuple[Tensor, ...]
) -> None:
    """Note on outputs where they come from, for the modules that read them; not where that would take two steps."""
    if call.sources:
        return
    for number, (one, place) in enumerate(zip(outputs, places, strict=True)):
        if one.grad_fn is not None:
            setattr(one, _MARK, GivenInChunks(call, number, place, tensors, one.grad_fn))


def sources_of(call: ChunkedCall) -> dict[int, GivenInChunks]:
    """Of the tensors among a call's arguments, by their number, those that chunks like its own gave for little."""
    found = {}
    for number, (index, tensor) in enumerate(zip(call.indices, call.tensors(), strict=True)):
        source: GivenInChunks | None = getattr(tensor, _MARK, None)
        if (
            source is not None
            and source.node is tensor.grad_fn
            and source.call.chunks == call.chunks
            and _are_there_together(source.call, call)
            and source.place.dims == tuple(axis.dims[index] for axis in call.axes)
            and set(source.place.ratios) == {1}
            and is_cheap_beside(source.call.weights, call.weights)
        ):
            found[number] = source
    return found


def _are_there_together(giver: ChunkedCall, reader: ChunkedCall) -> bool:
    """Whether the giver's weights are there in the reader's backward: FSDP2 may have freed another unit's by then."""
    if giver.unit is None or reader.unit is None:
        return not may_be_sharded()
    return giver.unit == reader.unit
