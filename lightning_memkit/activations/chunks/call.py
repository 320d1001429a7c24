"""One call of a module in chunks: its arguments, and what each chunk's second forward has to find as in the first."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_unflatten

from lightning_memkit.activations.chunks.axes import (
    ChunkAxis,
    Ranges,
    chunks_of,
    document_ends,
    is_ends,
    narrowed,
)
from lightning_memkit.activations.chunks.outputs import JoinedOutputs
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


@dataclass(slots=True)
class ChunkedCall:
    """A module's forward over the chunks of its arguments.

    Attributes:
        forward: the module's own forward.
        leaves: the path and value of every argument.
        structure: how the arguments are nested.
        axes: by what the call is split.
        held: torch's generators that the module has besides the global ones.
        chunks: begin and end of every chunk, an axis.
        indices: which leaves are tensors.
    """

    forward: Callable[..., Any]
    leaves: list[tuple[str, Any]]
    structure: Any
    axes: tuple[ChunkAxis, ...]
    held: Sequence[torch.Generator] = ()
    chunks: list[Ranges] = field(init=False)
    indices: list[int] = field(init=False)
    _modes: SurroundingModes = field(init=False)
    _generators: dict[int, Generators] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Look around."""
        self.chunks = chunks_of(self.axes)
        self.indices = [index for index, (_, leaf) in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        self._modes = SurroundingModes(self.tensors())

    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return [self.leaves[index][1] for index in self.indices]

    def let_go(self) -> None:
        """Keep no tensor: autograd does, and hands them back."""
        self.leaves = [(path, None if isinstance(leaf, Tensor) else leaf) for path, leaf in self.leaves]

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

    def outputs(self, joined: JoinedOutputs, tensors: Sequence[Tensor]) -> list[Tensor]:
        """All outputs; of a chunk nothing else is kept but where its random numbers began, if it drew any."""
        with self._modes.entered():
            for number, chunk in enumerate(self.chunks):
                before = Generators(self.held)
                found = tree_leaves(self.run(self.given(chunk, tensors)))
                joined.add(chunk, [one for one in found if isinstance(one, Tensor)])
                if not before.stand_as_now():
                    self._generators[number] = before
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
            return narrowed(tensor, index, self.axes, chunk)
        for axis, (begin, end) in zip(self.axes, chunk, strict=True):
            length = int(tensor[-1]) // axis.count
            tensor = document_ends(tensor, begin * length, end * length)
        return tensor
