"""Blocks compiled one by one, with the memory budget of torch's own partitioner."""

from collections.abc import Callable
from typing import Any

import torch


class CompiledForward:
    """Compiles forwards; what the partitioner saves of each is at most `budget` of what it would by itself.

    The budget bounds saved bytes and not the peak. It is read while a block is compiled, so it is bound to the
    compiler's backend: another budget compiles anew, and other compiled modules keep theirs.

    Args:
        budget: 1 saves what torch.compile saves by itself, 0 the blocks' inputs only.
    """

    def __init__(self, budget: float) -> None:
        self._budget = budget
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def __call__(self, plain: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a bound forward, compiled at its first call."""
        key = getattr(plain, "__func__", plain)
        if key not in self._compiled:
            self._compiled[key] = torch.compile(key, backend=self._backend)
        owner = getattr(plain, "__self__", None)
        return self._compiled[key](*(() if owner is None else (owner,)), *args, **kwargs)

    def _backend(self, graph: Any, inputs: Any) -> Any:
        from torch._functorch import config
        from torch._inductor.compile_fx import compile_fx

        with config.patch(activation_memory_budget=self._budget):
            return compile_fx(graph, inputs)
