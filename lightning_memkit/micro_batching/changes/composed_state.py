"""Counters, stored losses and lists that a step changes: each micro-batch begins with those before the step.

What the whole batch would have left is joined from what the micro-batches leave, by rules that a comparison
has confirmed (`lightning_memkit.micro_batching.parts.joining`): the same count, the mean of losses, all rows.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn

from lightning_memkit.micro_batching.changes.left_values import (
    holds,
    is_number,
    is_plain,
    like,
    with_untouched,
    without_graph,
)
from lightning_memkit.micro_batching.changes.step_changes import ABSENT
from lightning_memkit.micro_batching.changes.value_start import Anew, ListStart, ValueStart, start_of
from lightning_memkit.micro_batching.parts.joining import Joining
from lightning_memkit.micro_batching.parts.joining_rules import JoinError

Counts = Mapping[str, Sequence[float]]
_Form = tuple[str, bool]  # a name, and whether what is left is a list's whole contents (`Anew`)
_ADDING = frozenset({"sum", "max", "min", "concat"})  # rules that need no change by every micro-batch


class ComposedState:
    """Lets micro-batches leave attributes and lists of a module as their whole batch would.

    Args:
        module: the module that takes the step.
        names: the paths of attributes (`"encoder.last_loss"`) that its step sets or adds to.
        allowed: the relative error that counts as rounding.
    """

    def __init__(self, module: nn.Module, names: Sequence[str], allowed: float) -> None:
        self._module, self._allowed = module, allowed
        self.names = tuple(name for name in names if self._may_compose(name))
        self._rules: dict[_Form, Joining] = {}
        self._of_losses: set[_Form] = set()
        self._from_zero: set[str] = set()  # whose rules were learned while they were 0
        self._failed: set[str] = set()
        self._start: dict[str, ValueStart] = {}
        self._left: list[dict[str, Any]] = []
        self._moved: list[set[str]] = []  # what each micro-batch has changed
        self._uneven = set[str]()  # what some micro-batches have changed and others have not
        self._taken: list[str] = []  # what holds the loss of each micro-batch of the batch

    def begin(self) -> None:
        """Call before a batch: each of its micro-batches will start from the current values."""
        self._left, self._moved, self._taken, self._uneven = [], [], [], set()
        self._start = {name: start_of(self._value(name)) for name in self.names}

    def begin_part(self) -> None:
        """Call before each micro-batch; resets what the previous one has left."""
        if self._left:
            self._reset(self.names)

    def begin_anew(self) -> None:
        """Reset counters, single numbers and lists to their values at `begin`.

        Tensors with rows are not reset: whether a step reads those of the step before is yet to be found out.
        """
        values = {name: self._value(name) for name in self.names}
        self._reset([name for name, value in values.items() if isinstance(value, list) or is_plain(value)])

    @property
    def plain(self) -> set[str]:
        """The names of numbers and texts at `begin`."""
        return {name for name, start in self._start.items() if isinstance(start.value, (int, float, str))}

    def forget(self, names: Collection[str]) -> None:
        """Leave it to the micro-batches what they leave of these names, until a comparison has seen them change."""
        self.names = tuple(name for name in self.names if name not in names)
        self._rules = {form: rule for form, rule in self._rules.items() if form[0] not in names}
        self._of_losses = {form for form in self._of_losses if form[0] not in names}

    def _reset(self, names: Iterable[str]) -> None:
        for name in names:
            self._start[name].reset(self._value(name), partial(self._set, name))

    def left(self) -> dict[str, Any]:
        """What a micro-batch has left: values, the items that lists have gained, or all items of others (`Anew`)."""
        return {name: without_graph(start.left(self._value(name))) for name, start in self._start.items()}

    def end_part(self) -> None:
        """Call after each micro-batch; stores what it has left."""
        self._left.append(self.left())
        self._moved.append({name for name, start in self._start.items() if start.moved(self._value(name))})

    def finish(self, counts: Counts, kept: Sequence[int], losses: Sequence[Tensor]) -> frozenset[str]:
        """Call after the last micro-batch; sets what the whole batch would have left.

        Args:
            counts: the counts, by each way of weighing, of the micro-batches in `kept`.
            kept: the indices of the micro-batches that have a loss.
            losses: their losses.

        Returns:
            The names of what the rules don't settle: some micro-batches have counted an event and others have not,
            say, where a comparison has seen only such as count it; or a list has lost items.
        """
        parts = [self._left[index] for index in kept] or self._left
        if len(self._left) < 2 or not parts:
            return frozenset()
        doubtful = set[str]()
        for name, start in self._start.items():
            moves = [name in self._moved[index] for index in kept] or [name in moved for moved in self._moved]
            if not any(moves):
                continue
            values = [part[name] for part in parts]
            forms = {_form(name, value) for value in values}
            form = forms.pop()
            if form in self._of_losses and not forms:
                if kept and not all(holds(one, loss) for one, loss in zip(values, losses, strict=True)):
                    doubtful.add(name)
                    self._uneven.add(name)
                elif kept:
                    self._taken.append(name)
                continue
            rule = self._rules.get(form)
            try:
                if rule is None or forms:
                    raise JoinError(
                        f"{name} has gained items in some comparisons and lost some now, or the reverse"
                    )
                whole = with_untouched(rule.join(values, counts), values)
            except JoinError:  # the structure has changed since the comparison: the last one's value stays
                doubtful.add(name)
                continue
            if not all(moves) and not isinstance(start, ListStart) and not rule.kinds <= _ADDING:
                doubtful.add(name)
                self._uneven.add(name)
            if rule.doubtful or rule.unlike or self._depends_on_start(name, whole, values, counts, rule):
                doubtful.add(name)
            self._fill(name, whole)
        return frozenset(doubtful)

    def counts(self, names: Collection[str]) -> bool:
        """Whether one of them is a whole number in all micro-batches, or was changed by some of them only."""
        return any(
            name in self._uneven or all(isinstance(part[name], int) for part in self._left) for name in names
        )

    def _depends_on_start(
        self, name: str, whole: Any, values: Sequence[Any], counts: Counts, rule: Joining
    ) -> bool:
        """Whether a sum that was learned at 0 may be one of what micro-batches have added, not of what they left."""
        start = self._start[name].value
        if name not in self._from_zero or not is_number(start) or not all(map(is_number, values)):
            return False
        gained = rule.join([value - start for value in values], counts)
        return bool(abs(start + gained - whole) > 1e-6 * (1 + abs(whole)))

    def _fill(self, name: str, whole: Any) -> None:
        """Set what the whole batch would have left: a value, or the items of the list that is there."""
        value, start = self._value(name), self._start[name]
        if isinstance(start, ListStart) and isinstance(value, list) and isinstance(whole, list):
            start.fill(value, whole)
        else:
            self._set(name, whole)

    def take(self, loss: Tensor) -> None:
        """Store the batch's loss wherever each micro-batch has stored its own; call after `finish`."""
        for name in self._taken:
            left = self._left[-1][name]
            whole = type(left)([like(left[0], loss)]) if isinstance(left, list) else like(left, loss)
            self._fill(name, whole)

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
            form = _form(name, whole.get(name))
            alike_formed = all(_form(name, one) == form for one in left)
            if alike_formed and all(holds(one, loss) for one, loss in zip(left, losses, strict=True)):
                self._of_losses.add(form)
                continue
            if is_number(self._start[name].value) and self._start[name].value == 0:
                self._from_zero.add(name)
            rule = Joining(self._allowed)
            try:
                if not alike_formed:
                    raise JoinError(f"{name} loses items in some micro-batches only")
                rule.compare(whole[name], [part[name] for part in parts], counts)
            except (JoinError, KeyError):
                failed.append(name)
            else:
                self._rules[form] = rule
        self.names = tuple(name for name in self.names if name not in failed)
        self._failed |= set(failed)
        return failed

    def take_over(self, earlier: "ComposedState") -> None:
        """Keep what was learned before of state that this comparison has not seen change, or not like that."""
        own = self._rules.keys() | self._of_losses
        gone = {form for form in earlier._rules.keys() | earlier._of_losses if form[0] in self._failed}
        self._of_losses |= earlier._of_losses - own - gone
        self._rules |= {form: rule for form, rule in earlier._rules.items() if form not in own | gone}
        new = [name for name in earlier.names if name not in {*self.names, *self._failed}]
        self._from_zero |= earlier._from_zero & set(new)
        self.names = (*self.names, *new)

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
            and not isinstance(gained, Anew)
            and all(isinstance(item, (int, str)) for item in gained)
        )

    def _value(self, name: str) -> Any:
        owner = _owner(self._module, name)
        return ABSENT if owner is None else vars(owner).get(name.rpartition(".")[2], ABSENT)

    def _set(self, name: str, value: Any) -> None:
        owner, attribute = _owner(self._module, name), name.rpartition(".")[2]
        if owner is not None and value is ABSENT:
            vars(owner).pop(attribute, None)
        elif owner is not None:
            vars(owner)[attribute] = value


def with_earlier(state: ComposedState | None, earlier: ComposedState | None) -> ComposedState | None:
    """What a comparison has learned, and what earlier ones have of other state."""
    if state is None or earlier is None:
        return state or earlier
    state.take_over(earlier)
    return state


def _form(name: str, left: Any) -> _Form:
    return name, isinstance(left, Anew)


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
