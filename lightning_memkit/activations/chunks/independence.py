"""Asks a module, once, whether its rows or tokens act on each other: on a few of them, and without a trace."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves

from lightning_memkit.activations.chunks.axes import ChunkAxis, ChunkError, Ranges
from lightning_memkit.activations.chunks.call import ChunkedCall
from lightning_memkit.activations.chunks.differences import MORE_BITS, ROUNDING, allowed, difference, equal
from lightning_memkit.activations.chunks.gradient_sums import GradientSums
from lightning_memkit.activations.chunks.leaves import leaves_behind, next_number, oldest_behind
from lightning_memkit.activations.chunks.module_state import ModuleState, wider_dtypes
from lightning_memkit.activations.chunks.outputs import OutputPlace
from lightning_memkit.utilities.generators import Generators

MOST_ASKED = {"rows": 8, "tokens": 256}  # at most so many are asked, and no more than a chunk holds
A_TENSOR = object()


@dataclass(frozen=True)
class CheckedOutputs:
    """What a module was found to give.

    Attributes:
        places: where each tensor among the outputs' leaves has its rows and tokens.
        structure: how the outputs are nested.
        leaves: the outputs' leaves, `A_TENSOR` in the place of a tensor.
        outside: parameters that the module reads and that are not its own.
        is_final: whether the call's rows differed enough to tell for other calls, too.
    """

    places: tuple[OutputPlace, ...]
    structure: Any
    leaves: tuple[Any, ...]
    outside: tuple[Tensor, ...]
    is_final: bool


def check_independence(module: nn.Module, call: ChunkedCall) -> CheckedOutputs:
    """Run the module on a few rows and tokens of its call, with one of them replaced and in halves.

    Costs about eleven forwards and three backwards of at most a chunk each. In train mode; where that draws random
    numbers, halves are compared in eval mode. The module's buffers, attributes and all random numbers are then as
    before. Tensors without values (of a prediction) tell by their shapes where the outputs' rows are, and are taken to
    be independent.

    Raises:
        ChunkError: rows or tokens act on each other, in outputs or gradients, an output has none of its own, or the
            forward changes the module.
    """
    with torch.inference_mode(mode=False):  # which knows no gradients, and training asks no second time
        return _checked(module, call)


def _checked(module: nn.Module, call: ChunkedCall) -> CheckedOutputs:
    state, generators = ModuleState(module), Generators(call.held)
    axes = tuple(axis.first(min(axis.size, MOST_ASKED[axis.name])) for axis in call.axes)
    whole: Ranges = tuple((0, axis.count) for axis in axes)
    leaves = list(call.leaves)
    for index, tensor in zip(call.indices, call.given(whole, call.tensors()), strict=True):
        leaves[index] = (leaves[index][0], tensor.clone() if tensor.is_inference() else tensor)
    sample = ChunkedCall(call.forward, leaves, call.structure, axes, call.held)
    try:
        needs = [tensor.requires_grad for tensor in call.tensors()]
        return _Check(module, sample, generators).outputs(needs)
    finally:
        generators.restore()
        state.restore()


class _Check:
    def __init__(self, module: nn.Module, sample: ChunkedCall, generators: Generators) -> None:
        self._module, self._sample, self._generators = module, sample, generators
        self._name = type(module).__name__
        self._has_values = not any(isinstance(one, FakeTensor) for one in sample.tensors())

    def outputs(self, needs_gradient: Sequence[bool]) -> CheckedOutputs:
        differentiable, outside = self._graph(needs_gradient)
        with torch.no_grad():
            return self._compared(needs_gradient, differentiable, outside)

    def _compared(
        self, needs_gradient: Sequence[bool], differentiable: Sequence[bool], outside: tuple[Tensor, ...]
    ) -> CheckedOutputs:
        before = ModuleState(self._module)
        out, draws = self._run(self._sample.tensors())
        if changed := before.changed():
            raise ChunkError(
                f"{self._name} changes its {changed!r} in each forward, and would do so once a chunk. Change it in "
                "training_step, where the batch is whole, or run the modules within it in chunks that leave it alone."
            )
        places = tuple(OutputPlace(is_differentiable=one) for one in differentiable)
        is_final = True
        for axis in self._sample.axes:
            places = self._placed(axis, places, out, draws)
            if axis.ends is None and self._has_values:
                is_final = self._replaced(axis, places, out) and is_final
        if self._has_values:
            sums = GradientSums(self._module, self._sample, places, needs_gradient, outside)
            with _eval_mode(self._module) if draws else nullcontext():
                for axis in self._sample.axes:
                    another = None if axis.ends is not None else self._with_another(axis, axis.count // 2)
                    sums.check(axis, another or self._sample.tensors())
        leaves, structure = tree_flatten(out)
        others = tuple(A_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return CheckedOutputs(places, structure, others, outside, is_final)

    def _graph(self, needs_gradient: Sequence[bool]) -> tuple[list[bool], tuple[Tensor, ...]]:
        """Which outputs need gradients, and the parameters behind them that are not the module's."""
        first = next_number()
        given = [
            one.detach().requires_grad_(need)
            for one, need in zip(self._sample.tensors(), needs_gradient, strict=True)
        ]
        # Activation checkpointing around must not count what is saved here: its recomputation doesn't ask again. Nor
        # is it kept: an output that its own node keeps as a Python object would never be freed.
        with torch.enable_grad(), saved_tensors_hooks(lambda _: None, lambda _: torch.empty(0)):
            found = _tensors(self._run(given)[0])
        if oldest_behind(found) < first:
            raise ChunkError(
                f"{self._name} reads a tensor that was computed before its forward and that needs a gradient. Hand it "
                "to the module as an argument, so that each chunk gives its gradient."
            )
        own = {id(one) for one in (*given, *self._module.parameters())}
        outside = tuple(leaf for leaf in leaves_behind(found) if id(leaf) not in own)
        return [one.requires_grad for one in found], outside

    def _run(self, tensors: Sequence[Tensor], count: int | None = None) -> tuple[Any, bool]:
        """The outputs, from the same random numbers each time; whether any were drawn."""
        self._generators.restore()
        try:
            out = self._sample.run(tensors)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a module raises on fewer rows than it is made for
            counts = " and ".join(f"{count or axis.count} of {axis.name}" for axis in self._sample.axes)
            raise ChunkError(
                f"{self._name} does not run on {counts}, fewer than it was called with: {error!r}. Run the modules "
                "within it in chunks that take any number."
            ) from error
        return out, not self._generators.stand_as_now()

    def _placed(
        self, axis: ChunkAxis, places: Sequence[OutputPlace], out: Any, draws: bool
    ) -> tuple[OutputPlace, ...]:
        """Where the outputs have an axis, by the shapes of two halves, whose values are the whole's."""
        halves = [self._half(axis, one) for one in axis.halves()]
        parts = [_tensors(half) for half in halves]
        whole = _tensors(out)
        if any(len(part) != len(whole) for part in parts):
            raise ChunkError(f"{self._name} gives another number of outputs for fewer {axis.name}.")
        self._compare_others(axis, out, halves)
        placed = [
            self._place(axis, place, number, [part[number].shape for part in parts], whole[number].shape)
            for number, place in enumerate(places)
        ]
        if not self._has_values:
            return tuple(placed)
        if draws:
            with _eval_mode(self._module):
                whole = _tensors(self._run(self._sample.tensors())[0])
                parts = [_tensors(self._half(axis, one)) for one in axis.halves()]
        for number, place in enumerate(placed):
            for part, (begin, end) in zip(parts, axis.halves(), strict=True):
                if number < len(part) and number < len(whole):
                    expected = place.along(len(place.dims) - 1, whole[number], begin, end)
                    self._compare(axis, number, expected, part[number])
        return tuple(placed)

    def _place(
        self, axis: ChunkAxis, place: OutputPlace, number: int, parts: list[torch.Size], whole: torch.Size
    ) -> OutputPlace:
        dims = [
            dim for dim in range(len(whole)) if len(parts[0]) == len(whole) and parts[0][dim] != whole[dim]
        ]
        if not dims:
            return place.with_axis(None, 1)
        (begin, end), dim = axis.halves()[0], dims[0]
        ratio = whole[dim] / axis.count
        if len(dims) > 1 or ratio != int(ratio) or parts[0][dim] != (end - begin) * ratio:
            raise ChunkError(
                f"Output {number} of {self._name} is {tuple(whole)} for {axis.count} {axis.name} and "
                f"{tuple(parts[0])} for {end - begin}: chunks of it can't be joined along one dimension."
            )
        return place.with_axis(dim, int(ratio))

    def _replaced(self, axis: ChunkAxis, places: Sequence[OutputPlace], out: Any) -> bool:
        """Replace the first row, then one in the middle, by another: all others must give what they gave.

        Where they don't, bit for bit, more bits decide: experts, say, round otherwise if they get fewer tokens.

        Returns:
            Whether there was another one to replace it by.
        """
        whole, tensors = _tensors(out), self._sample.tensors()
        noise = [difference(a, b) for a, b in zip(whole, _tensors(self._run(tensors)[0]), strict=True)]
        found = False
        for target in {0, axis.count // 2}:
            another = self._with_another(axis, target)
            if another is None:
                continue
            found = True
            off = self._differences(axis, places, target, (whole, _tensors(self._run(another)[0])))
            if any(one > allowed for one, allowed in zip(off, noise, strict=True)):
                with wider_dtypes(self._module) as widened:
                    exact = [
                        _tensors(self._run([widened(one) for one in given])[0])
                        for given in (tensors, another)
                    ]
                off = self._differences(axis, places, target, (exact[0], exact[1]))
                for number, (one, like) in enumerate(zip(off, exact[0], strict=True)):
                    if one > allowed(like, MORE_BITS):
                        self._refuse(axis, number, whole[number], one)
        return found

    def _differences(
        self,
        axis: ChunkAxis,
        places: Sequence[OutputPlace],
        target: int,
        runs: tuple[list[Tensor], list[Tensor]],
    ) -> list[float]:
        """The largest difference of each output but in the row that was replaced."""
        number = [one.name for one in self._sample.axes].index(axis.name)
        others = [(begin, end) for begin, end in ((0, target), (target + 1, axis.count)) if begin < end]
        return [
            max(difference(place.along(number, a, *rows), place.along(number, b, *rows)) for rows in others)
            for place, a, b in zip(places, *runs, strict=True)
        ]

    def _with_another(self, axis: ChunkAxis, target: int) -> list[Tensor] | None:
        """The arguments with one row or token replaced by the first that differs; None if all are alike."""
        for source in range(axis.count):
            tensors, differs = [], False
            for index, tensor in zip(self._sample.indices, self._sample.tensors(), strict=True):
                dim = axis.dims[index]
                if dim is not None:
                    differs |= not equal(tensor.select(dim, source), tensor.select(dim, target))
                    tensor = tensor.clone()
                    tensor.select(dim, target).copy_(tensor.select(dim, source).clone())
                tensors.append(tensor)
            if differs:
                return tensors
        return None

    def _half(self, axis: ChunkAxis, one: tuple[int, int]) -> Any:
        ranges = tuple(one if other is axis else (0, other.count) for other in self._sample.axes)
        return self._run(self._sample.given(ranges, self._sample.tensors()), one[1] - one[0])[0]

    def _compare(self, axis: ChunkAxis, number: int, expected: Tensor, found: Tensor) -> None:
        off = difference(expected, found) if expected.shape == found.shape else float("inf")
        if off > allowed(found, ROUNDING):
            self._refuse(axis, number, found, off)

    def _refuse(self, axis: ChunkAxis, number: int, output: Tensor, off: float) -> NoReturn:
        raise ChunkError(
            f"{self._name} can't run in chunks of {axis.name}: its output {number}, of shape {tuple(output.shape)}, "
            f"differs by {off:.2g} where other {axis.name} are beside it. Batch statistics, attention over "
            f"{axis.name} and means over them need all of them: run the modules before or after these in chunks."
        )

    def _compare_others(self, axis: ChunkAxis, out: Any, halves: Sequence[Any]) -> None:
        for leaf, *others in zip(tree_leaves(out), *map(tree_leaves, halves), strict=True):
            if not isinstance(leaf, Tensor) and any(one is not leaf and one != leaf for one in others):
                raise ChunkError(
                    f"{self._name} gives {leaf!r} for {axis.count} {axis.name} and {others[0]!r} for fewer; that "
                    "can't be joined. Give tensors with a row each, or work it out in training_step."
                )


@contextmanager
def _eval_mode(module: nn.Module) -> Iterator[None]:
    modes = [(part, part.training) for part in module.modules()]
    for part, _ in modes:
        part.training = False
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def _tensors(out: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
