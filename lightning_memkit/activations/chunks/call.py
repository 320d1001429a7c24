"""One call of a module in chunks: its arguments, and what each chunk's second forward has to find as in the first."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_unflatten

from lightning_memkit.activations.chunks.axes import (
    ChunkAxis,
    Ranges,
    as_dense,
    chunks_of,
    document_ends,
    is_ends,
    narrowed,
)
from lightning_memkit.activations.chunks.outputs import JoinedOutputs, OutputPlace
from lightning_memkit.utilities.generators import Generators


class SurroundingModes:
    """Autocast and the default dtype as a forward found them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        types = {"cpu", *(tensor.device.type for tensor in tensors)}
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in sorted(types)
            if torch.amp.is_autocast_available(kind)
        ]
        self._dtype = torch.get_default_dtype()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run the body under them, without autocast's cache: a weight cast without gradient would be found there."""
        with ExitStack() as stack:
            for kind, enabled, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled=enabled, cache_enabled=False))
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self._dtype)
            yield


@dataclass(frozen=True)
class GivenInChunks:
    """Where an argument of a call in chunks comes from: another call in chunks, which can give it again.

    Attributes:
        call: the chunks that gave it.
        number: which of their outputs it is.
        place: where its rows and tokens are.
        tensors: the arguments of that call, which its own node keeps anyway; empty once they are kept for the reader.
        node: autograd's; another one behind the tensor means that it was changed since.
    """

    call: "ChunkedCall"
    number: int
    place: OutputPlace
    tensors: tuple[Tensor, ...]
    node: Any

    def let_go(self) -> "GivenInChunks":
        """The same without tensors and graph, to be held by a graph itself."""
        return replace(self, tensors=(), node=None)

    def again(self, chunk: int, tensors: Sequence[Tensor]) -> Tensor:
        """One chunk of it, bit for bit, from the arguments of the call that gave it."""
        with self.call.again(chunk), torch.no_grad():
            found = tree_leaves(self.call.run(self.call.given(self.call.chunks[chunk], tensors)))
        return [one for one in found if isinstance(one, Tensor)][self.number].detach()


@dataclass(slots=True)
class ChunkedCall:
    """A module's forward over the chunks of its arguments.

    Attributes:
        forward: the module's own forward.
        leaves: the path and value of every argument.
        structure: how the arguments are nested.
        axes: by what the call is split.
        held: torch's generators that the module has besides the global ones.
        weights: how many numbers the module's parameters have.
        unit: number of the modules whose weights are gathered together with this one's; None if that is unknown.
        chunks: begin and end of every chunk, an axis.
        indices: which leaves are tensors.
        sources: where those among these come from that are computed again instead of kept, by their number.
    """

    forward: Callable[..., Any]
    leaves: list[tuple[str, Any]]
    structure: Any
    axes: tuple[ChunkAxis, ...]
    held: Sequence[torch.Generator] = ()
    weights: int = 0
    unit: int | None = None
    chunks: list[Ranges] = field(init=False)
    indices: list[int] = field(init=False)
    sources: dict[int, GivenInChunks] = field(init=False, default_factory=dict)
    _modes: SurroundingModes = field(init=False)
    _generators: dict[int, Generators] = field(init=False, default_factory=dict)
    _gradients: tuple[Sequence[OutputPlace], Sequence[Tensor | None]] = field(init=False, default=((), ()))

    def __post_init__(self) -> None:
        """Look around."""
        self.chunks = chunks_of(self.axes)
        self.indices = [index for index, (_, leaf) in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        self._modes = SurroundingModes(self.tensors())

    def numbered(self) -> Iterator[tuple[int, Ranges]]:
        """The chunks to run, in order, with their numbers."""
        return iter(enumerate(self.chunks))

    @property
    def draws(self) -> bool:
        """Whether a chunk has drawn random numbers."""
        return bool(self._generators)

    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return [self.leaves[index][1] for index in self.indices]

    def give_gradients(self, places: Sequence[OutputPlace], grads: Sequence[Tensor | None]) -> None:
        """Keep the outputs' gradients, and where their rows are, for the node that runs next."""
        self._gradients = places, grads

    def take_gradients(self) -> tuple[Sequence[OutputPlace], Sequence[Tensor | None]]:
        """What was kept, which is kept no longer."""
        found, self._gradients = self._gradients, ((), ())
        return found

    def take_kept(self) -> list[Tensor]:
        """What autograd has to keep: the arguments, or what those that are computed again come from."""
        kept = [
            one
            for number, tensor in enumerate(self.tensors())
            for one in (self.sources[number].tensors if number in self.sources else (tensor,))
        ]
        self.sources = {number: source.let_go() for number, source in self.sources.items()}
        return kept

    def given_again(self, chunk: int, kept: Sequence[Tensor]) -> list[Tensor]:
        """What a chunk gets of the arguments' tensors in the backward, from what autograd kept."""
        found, following = [], 0
        for number, index in enumerate(self.indices):
            source = self.sources.get(number)
            first, following = following, following + (1 if source is None else len(source.call.indices))
            if source is None:
                found.append(self._given(index, kept[first].detach(), self.chunks[chunk]))
            else:
                found.append(source.again(chunk, kept[first:following]))
        return found

    def run(self, tensors: Sequence[Tensor]) -> Any:
        """The module's outputs for these tensors in the place of the arguments'."""
        leaves = [leaf for _, leaf in self.leaves]
        for index, tensor in zip(self.indices, tensors, strict=True):
            leaves[index] = tensor
        args, kwargs = tree_unflatten(leaves, self.structure)
        return self.forward(*args, **kwargs)

    def given(self, chunk: Ranges, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What a chunk gets of the arguments' tensors: views without history."""
        return [
            self._given(index, one.detach(), chunk) for index, one in zip(self.indices, tensors, strict=True)
        ]

    def narrowed(self, number: int, whole: Tensor, chunk: Ranges) -> Tensor:
        """The view of a tensor like the argument of this number among the tensors that belongs to a chunk."""
        return narrowed(whole, self.indices[number], self.axes, chunk)

    def splits(self, number: int) -> int:
        """By how many of the axes the argument of this number among the tensors is split."""
        return sum(axis.dims[self.indices[number]] is not None for axis in self.axes)

    def outputs(self, joined: JoinedOutputs) -> list[Tensor]:
        """All outputs; of a chunk nothing else is kept but where its random numbers began, if it drew any.

        Nor are the arguments: autograd keeps them, and hands them back.
        """
        tensors = self.tensors()
        with self._modes.entered():
            for number, chunk in self.numbered():
                before = Generators(self.held)
                found = tree_leaves(self.run(self.given(chunk, tensors)))
                joined.add(chunk, [one for one in found if isinstance(one, Tensor)])
                if not before.stand_as_now():
                    self._generators[number] = before
        self.leaves = [(path, None if isinstance(leaf, Tensor) else leaf) for path, leaf in self.leaves]
        return joined.tensors()

    @contextmanager
    def again(self, number: int) -> Iterator[None]:
        """Run the body as a chunk's first forward was, with gradient; random numbers go on from where they are."""
        with self._modes.entered(), torch.enable_grad():
            first = self._generators.get(number)
            if first is None:
                yield
                return
            now = Generators(self.held)
            first.restore()
            try:
                yield
            finally:
                now.restore()

    def _given(self, index: int, tensor: Tensor, chunk: Ranges) -> Tensor:
        if not is_ends(self.leaves[index][0]):
            return as_dense(narrowed(tensor, index, self.axes, chunk), tensor)
        for axis, (begin, end) in zip(self.axes, chunk, strict=True):
            length = int(tensor[-1]) // axis.count
            tensor = document_ends(tensor, begin * length, end * length)
        return tensor
