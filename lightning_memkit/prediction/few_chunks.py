"""Run few of many equal chunks or slices: the others take the same memory, and the same work."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

from torch import Tensor

from lightning_memkit.activations.chunks.axes import Ranges
from lightning_memkit.activations.chunks.call import ChunkedCall
from lightning_memkit.loss import chunks as loss_chunks
from lightning_memkit.optim import low_forms
from lightning_memkit.prediction.known_values import KnownValues
from lightning_memkit.prediction.replaced import replaced
from lightning_memkit.prediction.work import WorkLog

_RUN = 3  # of a kind: sums of gradients begin with the first chunk, and are written to from the third on


@contextmanager
def few_chunks(work: WorkLog, values: KnownValues) -> Iterator[None]:
    """Within the context, modules in chunks run three chunks of a size, whose work counts for all of that size.

    All of them run where they need not take the same: values have a say in shapes, or Python's random numbers may.
    """
    plain = ChunkedCall.numbered

    def numbered(call: ChunkedCall) -> Iterator[tuple[int, Ranges]]:
        weights, asked = _weights(call.chunks), values.asked
        for number, chunk in plain(call):
            if values.asked != asked or call.draws:
                weights = dict.fromkeys(range(len(call.chunks)), 1)
            if number in weights:
                with _counted(work, weights[number]):
                    yield number, chunk

    with replaced(ChunkedCall, numbered=numbered):
        yield


@contextmanager
def few_loss_chunks(work: WorkLog) -> Iterator[None]:
    """Within the context, a head's loss runs three chunks of tokens and of columns, whose work counts for all."""
    plain = loss_chunks.slices_of

    def slices(total: int, size: int) -> Iterator[slice]:
        found = list(plain(total, size))
        for number, weight in _weights([((one.start, one.stop),) for one in found]).items():
            with _counted(work, weight):
                yield found[number]

    with replaced(loss_chunks, slices_of=slices):
        yield


@contextmanager
def few_slices(most: int) -> Iterator[None]:
    """Within the context, low halves take another form in so many slices of each weight: all slices take the same."""
    plain = low_forms.slices_of

    def first(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        return islice(plain(*tensors), most)

    with replaced(low_forms, slices_of=first):
        yield


@contextmanager
def _counted(work: WorkLog, times: int) -> Iterator[None]:
    """Within the context, work counts so many times."""
    before = work.weight
    work.weight = before * times
    try:
        yield
    finally:
        work.weight = before


def _weights(chunks: list[Ranges]) -> dict[int, int]:
    """The chunks to run, by number, with how many each stands for."""
    kinds = defaultdict[object, list[int]](list)
    for number, chunk in enumerate(chunks):
        kinds[tuple((begin == 0, end - begin) for begin, end in chunk)].append(number)
    weights: dict[int, int] = {}
    for numbers in kinds.values():
        weights.update(dict.fromkeys(numbers[:_RUN], 1))
        weights[numbers[:_RUN][-1]] += len(numbers[_RUN:])
    return weights
