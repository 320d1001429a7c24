"""Find the module in which an operator runs, including its backward and recomputation."""

from bisect import bisect_right
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from typing_extensions import Self

_LAST = chr(0x10FFFF)


class Owners:
    """Tells whose operator is running, while entered; hooks all modules, a microsecond or two a query.

    A backward operator belongs to the module whose forward created the autograd node; a recomputed operator
    belongs to the module that is recomputed.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self._names: dict[int, str] = {}
        self._within: list[str] = []
        # (first autograd sequence number, module), in order.
        self._sequence: list[tuple[int, str]] = []
        self._entered = ExitStack()
        if module is not None:
            self.name(module)

    def name(self, module: nn.Module) -> None:
        """Register the names of a module's submodules; other modules are named by their class."""
        self._names = {id(submodule): name for name, submodule in module.named_modules()}

    @property
    def has_names(self) -> bool:
        """Whether names were registered."""
        return bool(self._names)

    def current(self) -> str:
        """The name of the innermost running module; empty outside of any."""
        if self._within:
            return self._within[-1]
        return self._owner_of_node() if torch._C._current_graph_task_id() != -1 else ""

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(self._enter).remove)
            stack.callback(register_module_forward_hook(self._leave, always_call=True).remove)
            self._entered = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._entered.close()
        self._within.clear()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._within.append(self._names.get(id(module), type(module).__name__))
        self._note_sequence()

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        if self._within:
            self._within.pop()
        self._note_sequence()

    def _note_sequence(self) -> None:
        self._sequence.append((torch.autograd._get_sequence_nr(), self._within[-1] if self._within else ""))

    def _owner_of_node(self) -> str:
        node = torch._C._current_autograd_node()
        if node is None or not self._sequence:
            return ""
        index = bisect_right(self._sequence, (node._sequence_nr(), _LAST)) - 1
        return self._sequence[index][1] if index >= 0 else ""
