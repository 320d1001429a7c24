"""Counters, noted losses and lists that a step changes: each micro-batch begins where the step did.

What the whole batch would have left is put together from what the micro-batches leave, by the rules that a comparison
has shown to hold (`lightning_memkit.micro_batching.parts.joining`): the same count, the mean of losses, all rows.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_memkit.micro_batching.changes.alike import alike
from lightning_memkit.micro_batching.parts.joining import Joining
from lightning_memkit.micro_batching.parts.joining_rules import JoinError

Counts = Mapping[str, Sequence[float]]


class ComposedState:
    """Attributes of a module, and lists that only grow, which micro-batches leave as their batch would.

    Args:
        module: the module that steps.
        names: attributes with their paths (`"encoder.last_loss"`) that its step sets or adds to.
        allowed: the relative error that is rounding.
    """

    def __init__(self, module: nn.Module, names: Sequence[str], allowed: float) -> None:
        self._module = module
        self.names = tuple(name for name in names if self._may_compose(name))
        self._rules = {name: Joining(allowed) for name in self.names}
        self._of_losses: list[str] = []
        self._start: dict[str, Any] = {}
        self._left: list[dict[str, Any]] = []

    def begin(self) -> None:
        """The batch begins: what is there now is what each micro-batch begins with."""
        self._left = []
        self._start = {}
        for name in self.names:
            value = self._value(name)
            self._start[name] = len(value) if isinstance(value, list) else value

    def begin_part(self) -> None:
        """A further micro-batch begins."""
        if self._left:
            self.begin_anew()

    def begin_anew(self) -> None:
        """Counters, single numbers and lists are again what they were when the batch began.

        What has rows is left as it is: a micro-batch would find other rows there than its own.
        """
        for name in self.names:
            value, start = self._value(name), self._start[name]
            if isinstance(value, list):
                del value[start:]
            elif _is_plain(value):
                self._set(name, start)

    def left(self) -> dict[str, Any]:
        """What a micro-batch has left: values, and what lists have gained."""
        left = {}
        for name, start in self._start.items():
            value = self._value(name)
            gained = value[start:] if isinstance(value, list) else value
            left[name] = _without_graph(gained)
        return left

    def end_part(self) -> None:
        """A micro-batch has run."""
        self._left.append(self.left())

    def finish(self, counts: Counts, kept: Sequence[int]) -> None:
        """The batch has run: leave what it would have left as a whole.

        Args:
            counts: ways of weighing, and what each micro-batch that counted counts by them.
            kept: which of those that ran these are.
        """
        parts = [self._left[index] for index in kept] or self._left
        if len(self._left) < 2 or not parts:
            return
        for name, rule in self._rules.items():
            try:
                whole = rule.join([part[name] for part in parts], counts)
            except JoinError:  # another structure than was compared: what stands there is the last one's
                continue
            value = self._value(name)
            if isinstance(value, list):
                value[self._start[name] :] = whole
            else:
                self._set(name, whole)

    def take(self, loss: Tensor) -> None:
        """Where each micro-batch has left its own loss, as a value or in a list, the batch leaves its.

        Called after `finish`.
        """
        for name in self._of_losses:
            value, left = self._value(name), self._left[-1][name]
            if isinstance(value, list):
                value[self._start[name] :] = [_like(left[0], loss)]
            else:
                self._set(name, _like(left, loss))

    def learn(
        self,
        whole: Mapping[str, Any],
        parts: Sequence[Mapping[str, Any]],
        counts: Counts,
        losses: Sequence[Tensor],
    ) -> list[str]:
        """Learn the rules from a batch run whole and in micro-batches; returns the names that follow none.

        These are left alone from then on.

        Args:
            whole: what the batch has left.
            parts: what each micro-batch has left.
            counts: ways of weighing, and what each micro-batch counts by them.
            losses: of each micro-batch: where they are what it has left, the batch leaves its own.
        """
        failed = []
        for name in self.names:
            left = [part.get(name) for part in parts]
            if all(_holds(one, loss) for one, loss in zip(left, losses, strict=True)):
                self._of_losses.append(name)
                continue
            try:
                self._rules[name].compare(whole[name], [part[name] for part in parts], counts)
            except (JoinError, KeyError):
                failed.append(name)
        self.names = tuple(name for name in self.names if name not in failed)
        self._rules = {name: self._rules[name] for name in self.names if name not in self._of_losses}
        return failed

    def _may_compose(self, name: str) -> bool:
        """Whether it is an attribute that is a value or a list; what other containers gain is not known."""
        if _owner(self._module, name) is None or not name.rpartition(".")[2].isidentifier():
            return False
        return not isinstance(self._value(name), (dict, set, deque, np.ndarray))

    def notes_integers(self, name: str, whole: Mapping[str, Any]) -> bool:
        """Whether a list gains nothing but integers and texts: a record of what ran."""
        gained = whole.get(name)
        return (
            isinstance(self._value(name), list)
            and isinstance(gained, list)
            and all(isinstance(item, (int, str)) for item in gained)
        )

    def _value(self, name: str) -> Any:
        owner = _owner(self._module, name)
        return None if owner is None else vars(owner).get(name.rpartition(".")[2])

    def _set(self, name: str, value: Any) -> None:
        owner = _owner(self._module, name)
        if owner is not None:
            vars(owner)[name.rpartition(".")[2]] = value


def _owner(module: nn.Module, name: str) -> nn.Module | None:
    """The module that has an attribute; None where the name is not one of a plain attribute."""
    path, _, attribute = name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError:
        return None
    return owner if attribute in vars(owner) or not hasattr(owner, attribute) else None


def _without_graph(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, (list, tuple, dict)):
        return tree_map_only(Tensor, _without_graph, value)
    return value


def _is_plain(value: Any) -> bool:
    """Whether a value is of numbers and texts only, and holds no tensor of several entries and nothing unknown."""
    return all(
        leaf.ndim == 0 if isinstance(leaf, Tensor) else isinstance(leaf, (int, float, str, type(None)))
        for leaf in tree_leaves(value)
    )


def _holds(value: Any, loss: Tensor) -> bool:
    """Whether a value is a loss, or a list has gained it alone."""
    if isinstance(value, list):
        return len(value) == 1 and _holds(value[0], loss)
    if isinstance(value, Tensor):
        return value.numel() == 1 and alike(value.detach().reshape(()), loss.detach().reshape(()).to(value))
    return isinstance(value, float) and alike(value, float(loss))


def _like(value: Any, loss: Tensor) -> Any:
    return loss.detach().reshape(value.shape).to(value) if isinstance(value, Tensor) else float(loss)
