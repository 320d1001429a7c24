"""Counters, stored losses and lists that a step changes: each micro-batch begins with those before the step.

What the whole batch would have left is joined from what the micro-batches leave, by rules that a comparison
has confirmed (`lightning_memkit.micro_batching.parts.joining`): the same count, the mean of losses, all rows.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_memkit.micro_batching.changes.alike import alike
from lightning_memkit.micro_batching.parts.joining import Joining
from lightning_memkit.micro_batching.parts.joining_rules import JoinError

Counts = Mapping[str, Sequence[float]]


class ComposedState:
    """Lets micro-batches leave attributes and growing lists of a module as their whole batch would.

    Args:
        module: the module that takes the step.
        names: the paths of attributes (`"encoder.last_loss"`) that its step sets or adds to.
        allowed: the relative error that counts as rounding.
    """

    def __init__(self, module: nn.Module, names: Sequence[str], allowed: float) -> None:
        self._module = module
        self.names = tuple(name for name in names if self._may_compose(name))
        self._rules = {name: Joining(allowed) for name in self.names}
        self._of_losses: list[str] = []
        self._from_zero: set[str] = set()  # whose rules were learned while they were 0
        self._start: dict[str, Any] = {}
        self._left: list[dict[str, Any]] = []

    def begin(self) -> None:
        """Call before a batch: each of its micro-batches will start from the current values."""
        self._left = []
        self._start = {}
        for name in self.names:
            value = self._value(name)
            self._start[name] = len(value) if isinstance(value, list) else value

    def begin_part(self) -> None:
        """Call before each micro-batch; resets what the previous one has left."""
        if self._left:
            self.begin_anew()

    def begin_anew(self) -> None:
        """Reset counters, single numbers and lists to their values at `begin`.

        Tensors with rows are not reset: the old ones need not have a micro-batch's number of rows.
        """
        for name in self.names:
            value, start = self._value(name), self._start[name]
            if isinstance(value, list):
                del value[start:]
            elif _is_plain(value):
                self._set(name, start)

    def left(self) -> dict[str, Any]:
        """What a micro-batch has left: values, and the items that lists have gained."""
        left = {}
        for name, start in self._start.items():
            value = self._value(name)
            gained = value[start:] if isinstance(value, list) else value
            left[name] = _without_graph(gained)
        return left

    def end_part(self) -> None:
        """Call after each micro-batch; stores what it has left."""
        self._left.append(self.left())

    def finish(self, counts: Counts, kept: Sequence[int]) -> frozenset[str]:
        """Call after the last micro-batch; sets what the whole batch would have left.

        Returns:
            The names of what the rules don't settle: some micro-batches have counted an event and others have not,
            say, where a comparison has seen only such as count it.

        Args:
            counts: the counts, by each way of weighing, of the micro-batches in `kept`.
            kept: the indices of the micro-batches that have a loss.
        """
        parts = [self._left[index] for index in kept] or self._left
        if len(self._left) < 2 or not parts:
            return frozenset()
        doubtful = set[str]()
        for name, rule in self._rules.items():
            values = [part[name] for part in parts]
            try:
                whole = rule.join(values, counts)
            except JoinError:  # the structure has changed since the comparison: the last one's value stays
                doubtful.add(name)
                continue
            if rule.doubtful or self._depends_on_start(name, whole, values, counts):
                doubtful.add(name)
            value = self._value(name)
            if isinstance(value, list):
                value[self._start[name] :] = whole
            else:
                self._set(name, whole)
        return frozenset(doubtful)

    def counts(self, names: Collection[str]) -> bool:
        """Whether one of them is a whole number in all micro-batches."""
        return any(all(isinstance(part[name], int) for part in self._left) for name in names)

    def _depends_on_start(self, name: str, whole: Any, values: Sequence[Any], counts: Counts) -> bool:
        """Whether a sum that was learned at 0 may be one of what micro-batches have added, not of what they left."""
        start = self._start[name]
        if name not in self._from_zero or not _is_number(start) or not all(map(_is_number, values)):
            return False
        gained = self._rules[name].join([value - start for value in values], counts)
        return bool(abs(start + gained - whole) > 1e-6 * (1 + abs(whole)))

    def take(self, loss: Tensor) -> None:
        """Store the batch's loss wherever each micro-batch has stored its own; call after `finish`."""
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
        """Learn the rules from a batch run whole and in micro-batches.

        Args:
            whole: what the batch has left.
            parts: what each micro-batch has left.
            counts: the counts of the micro-batches, by each way of weighing.
            losses: the micro-batches' losses, to recognize attributes that store the loss.

        Returns:
            The names that follow no rule; they are no longer handled.
        """
        failed = []
        for name in self.names:
            left = [part.get(name) for part in parts]
            if all(_holds(one, loss) for one, loss in zip(left, losses, strict=True)):
                self._of_losses.append(name)
                continue
            if _is_number(self._start[name]) and self._start[name] == 0:
                self._from_zero.add(name)
            try:
                self._rules[name].compare(whole[name], [part[name] for part in parts], counts)
            except (JoinError, KeyError):
                failed.append(name)
        self.names = tuple(name for name in self.names if name not in failed)
        self._rules = {name: self._rules[name] for name in self.names if name not in self._of_losses}
        return failed

    def _may_compose(self, name: str) -> bool:
        """Whether it is an attribute that is no container, or a list: of others, gains can't be told."""
        if _owner(self._module, name) is None or not name.rpartition(".")[2].isidentifier():
            return False
        return not isinstance(self._value(name), (dict, set, deque, np.ndarray))

    def notes_integers(self, name: str, whole: Mapping[str, Any]) -> bool:
        """Whether a list gains only integers and strings: a log of what ran."""
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


def _owner(module: nn.Module, name: str) -> nn.Module | Tensor | None:
    """The module, parameter or buffer that holds an attribute in its `__dict__`, or may; None for any other name."""
    path, _, attribute = name.rpartition(".")
    owner = _at(module, path)
    if owner is None:
        return None
    return owner if attribute in vars(owner) or not hasattr(owner, attribute) else None


def _at(module: nn.Module, path: str) -> nn.Module | Tensor | None:
    try:
        return module.get_submodule(path)
    except AttributeError:
        above, _, last = path.rpartition(".")
    try:
        owner = module.get_submodule(above)
    except AttributeError:
        return None
    tensor = owner._parameters.get(last)
    return owner._buffers.get(last) if tensor is None else tensor


def _without_graph(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, (list, tuple, dict)):
        return tree_map_only(Tensor, _without_graph, value)
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_plain(value: Any) -> bool:
    """Whether a value consists of numbers, strings and 0-dim tensors only."""
    return all(
        leaf.ndim == 0 if isinstance(leaf, Tensor) else isinstance(leaf, (int, float, str, type(None)))
        for leaf in tree_leaves(value)
    )


def _holds(value: Any, loss: Tensor) -> bool:
    """Whether a value is the loss, or the only item that a list has gained."""
    if isinstance(value, list):
        return len(value) == 1 and _holds(value[0], loss)
    if isinstance(value, Tensor):
        return value.numel() == 1 and alike(value.detach().reshape(()), loss.detach().reshape(()).to(value))
    return isinstance(value, float) and alike(value, float(loss))


def _like(value: Any, loss: Tensor) -> Any:
    return loss.detach().reshape(value.shape).to(value) if isinstance(value, Tensor) else float(loss)
