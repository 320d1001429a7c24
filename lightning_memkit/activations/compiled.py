"""Compiles blocks one by one with the memory budget of torch's partitioner, and checks that it lowers the peak."""

import copy
import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._guards import CompileContext

from lightning_memkit.activations.compiled_peak import (
    NO_BOUND,
    Compiled,
    PeakVerdict,
    can_measure,
    choose_budget,
    peak_of_row,
)
from lightning_memkit.activations.randomness import OperatorRandomState
from lightning_memkit.memory.units import format_bytes
from lightning_memkit.utilities.errors import NoEffectWarning


class CompiledForward:
    """Compiles forwards; the partitioner saves at most a fraction `budget` of what it would save by itself.

    The budget bounds saved bytes and not the peak. So the first training forward of each class of blocks
    measures the peak with and without the budget. A budget that does not lower the peak is replaced by the
    best of a few larger ones, or by none, with a warning. Price: one more compilation, up to four if the
    budget does not help, and two runs of one block for each; results are those of the budget that is used.

    The budget is read while a block is compiled, so it is bound to the compiler's backend: another budget
    compiles again, and other compiled modules keep theirs.

    Args:
        budget: 1 saves what torch.compile saves by itself, 0 only the blocks' inputs.
        blocks: all blocks that will be called; their number weighs saved bytes against the temporaries of one
            backward.
    """

    def __init__(self, budget: float, blocks: Sequence[nn.Module] = ()) -> None:
        self._budget = budget
        self._count = Counter(_function(block.forward) for block in blocks)
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def __call__(self, plain: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a bound forward; it is compiled at its first call."""
        key, owner = _function(plain), getattr(plain, "__self__", None)
        if key not in self._compiled:
            name = type(owner).__name__ if owner is not None else getattr(key, "__name__", "a block")
            backend = BoundedBackend(self._budget, name, max(1, self._count[key]))
            self._compiled[key] = torch.compile(key, backend=backend)
        return self._compiled[key](*(() if owner is None else (owner,)), *args, **kwargs)


class BoundedBackend:
    """Inductor with a budget for one class of blocks; each graph is measured before its first run.

    Args:
        budget: the budget that was asked for.
        name: the class's name, for messages.
        blocks: how many such blocks the model has.
    """

    def __init__(self, budget: float, name: str, blocks: int) -> None:
        self.budget = budget
        self._name = name
        self._blocks = blocks
        self._used: dict[Any, float] = {}  # by the traced code: other shapes compile it again
        self._said = False

    def __call__(self, graph: Any, inputs: Sequence[Any]) -> Compiled:
        """Compile a graph."""
        context = CompileContext.current_compile_id()
        key = context and context.frame_id
        budget = self._used.get(key, self.budget)
        if budget == NO_BOUND or key in self._used or not _is_measurable(graph, inputs):
            return _compile(graph, inputs, budget)
        return _MeasuredFirst(self, key, graph, inputs)

    def judge(self, key: Any, graph: Any, compiled: Compiled, inputs: Sequence[Any]) -> Compiled | None:
        """The compiled graph to use from now on; None if these inputs can't be measured.

        Args:
            key: identifies the code that the graph was traced from.
            graph: the graph before it was compiled.
            compiled: the graph compiled with the budget that was asked for.
            inputs: those of a real call.
        """
        if not can_measure(inputs):
            return None
        candidates = {self.budget: compiled}

        def peak_of(budget: float) -> float | None:
            if budget not in candidates:
                candidates[budget] = _compile(copy.deepcopy(graph), inputs, budget)
            return peak_of_row(candidates[budget], inputs, self._blocks)

        # Runs draw random numbers, and compilations may.
        with OperatorRandomState.of(tuple(inputs)).restored():
            verdict = choose_budget(self.budget, peak_of)
        if verdict is None:
            return compiled
        self._used[key] = verdict.used
        self._say(verdict)
        return candidates[verdict.used]

    def _say(self, verdict: PeakVerdict) -> None:
        if self._said or verdict.used == verdict.asked and verdict.helps:
            return
        self._said = True  # once, not for every graph of a forward
        peaks = ", ".join(
            f"{_size(peak)} {'without a bound' if budget == NO_BOUND else f'at {budget:g}'}"
            for budget, peak in sorted(verdict.peaks.items())
        )
        said = (
            f'"compile:{verdict.asked:g}" does not lower the peak of {self._blocks} x {self._name} by 2 % or more '
            f"(measured on one, predicted for all: {peaks})"
        )
        if verdict.helps:
            warnings.warn(
                f'{said}; "compile:{verdict.used:g}" is used, write that to leave out the search.',
                stacklevel=2,
            )
            return
        warnings.warn(
            f'{said}, nor does a larger budget; "compile:{verdict.used:g}" is used. Write "compile:1" to compile; '
            'for a lower peak take "full" where blocks are many, or a smaller micro-batch.',
            NoEffectWarning,
            stacklevel=2,
        )


class _MeasuredFirst:
    """A compiled graph that is measured at its first call whose inputs can be measured."""

    def __init__(self, backend: BoundedBackend, key: Any, graph: Any, inputs: Sequence[Any]) -> None:
        before = copy.deepcopy(graph)  # compiling may rewrite it
        self._run = _compile(graph, inputs, backend.budget)
        self._judge: Callable[[Sequence[Any]], Compiled | None] | None = partial(
            backend.judge, key, before, self._run
        )

    def __call__(self, *inputs: Any) -> Any:
        if self._judge is not None:
            found = self._judge(inputs)
            if found is not None:
                self._run, self._judge = found, None
        return self._run(*inputs)


def _compile(graph: Any, inputs: Sequence[Any], budget: float) -> Compiled:
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    options: dict[str, Any] = {"activation_memory_budget": budget}
    if hasattr(config, "unsafe_treat_script_objects_as_zero_size"):
        options["unsafe_treat_script_objects_as_zero_size"] = True  # a DTensor's mesh holds no tensors
    with config.patch(**options):
        return compile_fx(graph, inputs)  # pyright: ignore[reportArgumentType, reportReturnType]


def _is_measurable(graph: Any, inputs: Sequence[Any]) -> bool:
    """Whether a graph can be run once more by itself: its sizes are fixed and no other rank takes part."""
    if any(isinstance(value, torch.SymInt) for value in inputs):
        return False
    targets = (f"{getattr(node.target, '__module__', '')} {node.target}" for node in graph.graph.nodes)
    return not any("c10d" in target or "torch.distributed" in target for target in targets)


def _function(forward: Callable[..., Any]) -> Any:
    return getattr(forward, "__func__", forward)


def _size(peak_bytes: float) -> str:
    return "out of memory" if math.isinf(peak_bytes) else format_bytes(int(peak_bytes))
