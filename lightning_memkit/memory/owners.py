"""In which module an operator runs, its backward and what is made again included."""

from bisect import bisect_right
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from typing_extensions import Self

_LAST = chr(0x10FFFF)


class Owners:
    """Says whose operator runs now, while it is entered; hooks on all modules, a microsecond or two a question.

    A backward belongs to the module in whose forward autograd made the node; what activation checkpointing makes
    again belongs to the module that runs again.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self._names: dict[int, str] = {}
        self._within: list[str] = []
        # From which number of autograd's on nodes are of which module.
        self._sequence: list[tuple[int, str]] = []
        self._entered = ExitStack()
        if module is not None:
            self.name(module)

    def name(self, module: nn.Module) -> None:
        """Know the module's submodules by their names; all others go by their class."""
        self._names = {id(submodule): name for name, submodule in module.named_modules()}

    @property
    def has_names(self) -> bool:
        """Whether a module was named."""
        return bool(self._names)

    def current(self) -> str:
        """The innermost module; empty outside of any."""
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
