"""Selects the parameters that a fused step can take, grouped by the rule that their step follows.

The optimizer itself steps the others on float32 shadows: states in another form after a resume, gradients
with other strides, classes without a recipe.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import islice
from operator import is_
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_memkit.optim import native
from lightning_memkit.optim.blocks import flat_views, local_part
from lightning_memkit.optim.fused.operands import SGD, Operands, Rule
from lightning_memkit.optim.fused.recipes import RECIPES, Numbers, StepRecipe
from lightning_memkit.optim.fused.seats import Seat, SeatKind, Seats, State
from lightning_memkit.optim.fused.wanted import StepStorage, WantedStates, completed, may_take, wanted_states
from lightning_memkit.optim.modes import low_state_of
from lightning_memkit.optim.pieces import Slot
from lightning_memkit.optim.quantised import CODES, SCALES

_DEVICES = ("cpu", "cuda")
_GRADIENTS = (torch.bfloat16, torch.float32)
_COUNT = "step"
_ONE = torch.tensor(1.0)
_MANY = 32  # counts: advancing so many in C++ is worth the wait for its compiler, once a machine
_MOST_SEATINGS = 1024  # per optimizer; more means that they are not reused
_memories: "WeakKeyDictionary[Optimizer, dict[StepStorage, _Memory]]" = WeakKeyDictionary()


def take(
    optimizer: Optimizer, storage: StepStorage, ready: Sequence[Slot]
) -> tuple[list[tuple[Rule, Operands]], list[Slot]]:
    """Split parameters into those that a fused step takes, grouped by rule, and the others.

    Missing states of those taken are created (bfloat16, or 8-bit), and their step counts advance.

    Args:
        optimizer: any.
        storage: the compensation, which stores the bits that bfloat16 lacks, and whether moments have 8 bits.
        ready: bfloat16 parameters that have their gradients.
    """
    recipe = RECIPES.get(f"{type(optimizer).__module__}.{type(optimizer).__qualname__}")
    if not ready or recipe is None or getattr(optimizer, "grad_scale", None) is not None:
        return [], list(ready)
    with torch.no_grad():  # otherwise each DTensor's shard would add a node to the graph
        return _Taking(optimizer, storage, recipe).take(ready)


class _Seating(NamedTuple):
    """The seats of parameters that are stepped together, by kind, and the positions of those without a seat."""

    seats: list[Seats]
    others: list[int]


class _Memory:
    """What is known of an optimizer's parameters from earlier steps; keeps no tensor alive."""

    def __init__(self) -> None:
        self.seats: dict[int, Seat] = {}
        self.seatings: dict[tuple[int, int], _Seating] = {}
        self.numbers: list[Numbers | None] = []
        self.wanted: list[WantedStates | None] = []  # as follows from the numbers


class _Taking:
    """The selection of one step."""

    def __init__(self, optimizer: Optimizer, storage: StepStorage, recipe: StepRecipe) -> None:
        self._optimizer, self._recipe = optimizer, recipe
        self._low = low_state_of(storage.mode)
        self._memory = _memories.setdefault(optimizer, {}).setdefault(storage, _Memory())
        self._numbers = [recipe.numbers(optimizer, group) for group in optimizer.param_groups]
        # The states that a parameter must have; a rule's class and whether it has momentum decide.
        if self._numbers != self._memory.numbers:
            self._memory.numbers = self._numbers
            self._memory.wanted = [
                None if numbers is None else wanted_states(recipe.rule(numbers, group, 1), storage)
                for numbers, group in zip(self._numbers, optimizer.param_groups, strict=True)
            ]
        self._wanted = self._memory.wanted
        self._first: set[Parameter] = set()  # parameters without momentum before this step
        self._states: list[State | None] = []  # of the parameters

    def take(self, ready: Sequence[Slot]) -> tuple[list[tuple[Rule, Operands]], list[Slot]]:
        parameters, found = [slot.parameter for slot in ready], None
        known, key = self._memory.seatings, (ready[0].index, len(ready))
        # Try the remembered seating, then remembered seats in a new seating, then new seats.
        for seat in (known.get, partial(self._seated, ready), partial(self._seated, ready, anew=True)):
            seating = seat(key)
            found = None if seating is None else self._find(seating, ready, parameters)
            if seating is not None and found is not None:
                break
        else:
            raise AssertionError("what was just seated does not fit")
        if key not in known and len(known) >= _MOST_SEATINGS:
            known.clear()
        known[key] = seating
        return self._by_rule(seating.seats, found, parameters), [ready[place] for place in seating.others]

    def _find(
        self, seating: _Seating, ready: Sequence[Slot], parameters: list[Parameter]
    ) -> list[Operands] | None:
        """The operands by kind; None if the seating is out of date."""
        if any(self._fits(ready[place]) for place in seating.others):
            return None
        states, found = self._states_of(parameters), []
        self._states = states
        for seats in seating.seats:
            wanted = self._wanted[seats.kind.group]
            if wanted is None or seats.kind.names not in wanted.names():
                return None
            operands = seats.find(parameters, states)
            if operands is None:
                return None
            found.append(operands)
        return found

    def _states_of(self, parameters: list[Parameter]) -> list[State | None]:
        states = self._optimizer.state
        if len(parameters) == len(states) and all(map(is_, states, parameters)):
            return list(states.values())
        if 4 * len(parameters) < len(states):
            return [states.get(parameter) for parameter in parameters]
        by_identity = dict(zip(map(id, states), states.values(), strict=True))  # hashing a tensor is slow
        return [by_identity.get(id(parameter)) for parameter in parameters]

    def _seated(self, ready: Sequence[Slot], _: Any, *, anew: bool = False) -> _Seating:
        """A seating of the parameters that reuses the seats they have, or makes all of them anew if `anew`."""
        seated: defaultdict[SeatKind, list[tuple[int, Seat]]] = defaultdict(list)
        others: list[int] = []
        for place, slot in enumerate(ready):
            seat = None if anew else self._memory.seats.get(slot.index)
            if seat is None or seat.parameter() is not slot.parameter or seat.kind.group != slot.group:
                seat = self._seat(slot)
            if seat is None:
                others.append(place)
                continue
            self._memory.seats[slot.index] = seat
            seated[seat.kind].append((place, seat))
        seats = [Seats(*map(list, zip(*pairs, strict=True))) for pairs in seated.values()]
        return _Seating(seats, others)

    def _by_rule(
        self, seated: list[Seats], found: list[Operands], parameters: list[Parameter]
    ) -> list[tuple[Rule, Operands]]:
        """The operands grouped by rule and stage; step counts advance."""
        taken: list[tuple[Rule, Operands]] = []
        states = [self._states[place] for seats in seated for place in seats.places]
        steps = iter(self._counted([state for state in states if state is not None]))
        for seats, operands in zip(seated, found, strict=True):
            numbers, group = self._numbers[seats.kind.group], self._optimizer.param_groups[seats.kind.group]
            assert numbers is not None
            if self._recipe.counts:
                stages = list(islice(steps, len(operands)))
            else:
                stages = [int(parameters[place] in self._first) for place in seats.places]
            different = dict.fromkeys(stages)
            for stage in different:
                of_stage = operands
                if len(different) > 1:
                    of_stage = operands.only([place for place, one in enumerate(stages) if one == stage])
                taken.append((self._recipe.rule(numbers, group, stage), of_stage))
        return taken

    def _counted(self, states: list[State]) -> list[int]:
        """The number of this step in each parameter's state; the counts advance."""
        if not self._recipe.counts or not states:
            return []
        counts: list[Any] = [state.get(_COUNT) for state in states]
        # As torch's optimizers keep them. The fake tensors of a prediction have no memory to write to.
        plain = [
            type(one) is Tensor and one.dtype is torch.float32 and one.is_cpu and not one.ndim
            for one in counts
        ]
        if all(plain) and (native.is_loaded() or len(counts) >= _MANY and native.why_unavailable() is None):
            return list(map(int, native.advance_(counts)))
        counts = [_on_the_host(state) for state in states]
        steps = [int(count.item()) + 1 for count in counts]  # a fake count is known until it changes
        # A Python number would become one tensor for each count.
        torch._foreach_add_(counts, _ONE, alpha=1.0)
        return steps

    def _fits(self, slot: Slot) -> bool:
        """Whether a fused step can take a parameter; missing states are no obstacle."""
        parameter, gradient, all_wanted = slot.parameter, slot.parameter.grad, self._wanted[slot.group]
        if all_wanted is None or gradient is None or gradient.dtype not in _GRADIENTS:
            return False
        if parameter.device.type not in _DEVICES or parameter.dim() == 0:  # scalars keep float32 moments
            return False
        state: State = self._optimizer.state.get(parameter) or {}
        wanted = all_wanted.of(parameter)
        if not may_take(state, wanted, parameter):
            return False
        there = [state[name] for name in wanted if state.get(name) is not None and not name.endswith(SCALES)]
        return flat_views(*map(local_part, (parameter, gradient, *there))) is not None

    def _seat(self, slot: Slot) -> Seat | None:
        """A seat for a parameter, whose missing states are created; None if a fused step can't take it."""
        if not self._fits(slot):
            return None
        parameter, all_wanted = slot.parameter, self._wanted[slot.group]
        assert all_wanted is not None
        wanted = all_wanted.of(parameter)
        states = self._optimizer.state
        state: State = states.get(parameter) or {}
        if state.get(SGD.first_name) is None and state.get(SGD.first_name + CODES) is None:
            self._first.add(parameter)
        found = completed(state, wanted, parameter)
        state.update(found)
        states[parameter] = state
        return Seat(slot, list(found.values()), tuple(found), has_low=self._low is not None)


def _on_the_host(state: State) -> Tensor:
    """The step count as a CPU tensor: reading one from a device would synchronize once for each parameter."""
    count = state.get(_COUNT)
    if isinstance(count, Tensor) and count.is_cpu:
        return count
    state[_COUNT] = torch.tensor(float(state.get(_COUNT, 0)))
    return state[_COUNT]
