"""Detects steps that compare evaluations of their closure: line searches, curvature from gradient differences.

A step on compensated weights computes in float32; the weights that it leaves are rounded. SAM uses the
gradients of its evaluations as any optimizer uses its one gradient, so rounding costs it no more than its
base optimizer. A step that compares evaluations goes wrong: on bfloat16 weights gradients and losses change
in jumps, and their differences are mostly rounding error. LBFGS ends as far from its float32 result as it has
moved, even where weights change by one part in 2^17. Only the exact float32 weight keeps such a step correct.

To tell the two kinds apart, small copies of the optimizer are stepped on made-up gradients and losses, and
their moves are compared: under a constant gradient and one that changes by 2 %, under falling and rising
losses.
"""

import warnings
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lightning_memkit.optim.closures import with_closure
from lightning_memkit.optim.methods import local_optimizer, stock_step, uses_closure_its_own_way
from lightning_memkit.optim.modes import Mode, States
from lightning_memkit.optim.pieces import is_compensated, slots
from lightning_memkit.optim.state_dtypes import storage_of
from lightning_memkit.optim.tiny_copies import tiny_copy
from lightning_memkit.utilities.generators import Generators

_STEPS = 4
# A step that takes more iterates until convergence; no step with a fixed count takes as many.
_EVALUATIONS_A_STEP = 100
# Of the gradient, at the farthest evaluation; an ordinary step answers by moving about 2 % farther.
_CHANGE = 0.02
_TELLS = 0.25  # of the move: a larger difference means that the step decided something
# Change per evaluation: larger than what a slope of 1 promises to Armijo's condition.
_LOSS, _LOSS_CHANGE = 1000.0, 5.0


@dataclass(frozen=True)
class Tried:
    """What trial steps of small copies have shown.

    Attributes:
        compares: whether the optimizer's move depends on differences between evaluations.
        rounded_states: names of its states that ``"compact"`` and ``"8-bit"`` states would round.
    """

    compares: bool
    rounded_states: frozenset[str] = frozenset()


class _TooManyEvaluations(BaseException):  # noqa: N818  # past a step's own `except Exception`
    """A step keeps evaluating its closure."""


def refuse_comparisons(optimizer: Optimizer, mode: Mode, states: States) -> bool:
    """Refuse a step that compares its evaluations, if weights or states are rounded between steps.

    Args:
        optimizer: any.
        mode: the mode of its compensation.
        states: the states of its compensation.

    Returns:
        True if this stays undecided because no small copy can be stepped: then the step itself must be
        watched.

    Raises:
        ValueError: it compares evaluations, and its weights or states would be rounded.
    """
    optimizer = local_optimizer(optimizer)
    if (mode == "split" and states == "exact") or not uses_closure_its_own_way(optimizer):
        return False
    if not any(is_compensated(slot.parameter) for slot in slots(optimizer)):
        return False
    tried = try_comparisons(optimizer)
    if tried is None:
        return True
    rounded = tried.rounded_states if states != "exact" else ()
    if tried.compares and (mode != "split" or rounded):
        raise ValueError(
            f"{_options(mode, states)} with {type(optimizer).__name__}: its step compares evaluations of its closure "
            "(a line search, or curvature from differences of gradients), and takes other steps where what it leaves "
            f"is rounded{_named(rounded)}. {_remedy(mode, exact=bool(rounded))}"
        )
    return False


def untried_error(optimizer: Optimizer, mode: Mode, states: States) -> ValueError:
    """The error for a step that evaluates in its own way and of which no small copy could be stepped at setup."""
    return ValueError(
        f"{_options(mode, states)} with {type(optimizer).__name__}: its step evaluates its closure again, or after it "
        "has moved weights. If it compares the evaluations (a line search, curvature from differences of gradients), "
        "it takes other steps where what it leaves is rounded; no small copy of it could be stepped at setup to see "
        f"whether it does. The weights are as before this step. {_remedy(mode, exact=states != 'exact')}"
    )


def try_comparisons(optimizer: Optimizer) -> Tried | None:
    """Step small copies of an optimizer to see whether it compares evaluations; None if none can be stepped.

    Random states are restored, and warnings are suppressed.
    """
    if type(optimizer) is LBFGS:
        return Tried(compares=True)
    generators = Generators()

    def stepped(change: float = 0.0, loss_change: float = 0.0) -> _TestProblem:
        generators.restore()
        return _stepped(optimizer, change, loss_change)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            constant = stepped()
            compares = constant.endless or isinstance(optimizer, LBFGS)
            if constant.farthest == 0 and not compares:
                return None
            if not compares:
                falling, rising = stepped(loss_change=-_LOSS_CHANGE), stepped(loss_change=_LOSS_CHANGE)
                compares = _differ(falling, rising)
            if not compares:
                curved = (stepped(share * _CHANGE / constant.farthest) for share in (1.0, 0.5))
                compares = any(_differ(constant, other) for other in curved)
    except Exception:
        return Tried(compares=True) if isinstance(optimizer, LBFGS) else None
    finally:
        generators.restore()
    return Tried(compares, frozenset(constant.rounded_states))


def _stepped(optimizer: Optimizer, change: float, loss_change: float) -> "_TestProblem":
    tiny = tiny_copy(optimizer)
    problem = _TestProblem(tiny, change, loss_change)
    step = with_closure(stock_step(tiny), problem.closure)
    try:
        for _ in range(_STEPS):
            problem.evaluations_left = _EVALUATIONS_A_STEP
            step()
    except _TooManyEvaluations:
        problem.endless = True
    problem.note_distance()
    for slot in slots(tiny):
        state, group = tiny.state.get(slot.parameter, {}), tiny.param_groups[slot.group]
        for name, value in state.items():
            single = value.float() if isinstance(value, Tensor) else value
            if storage_of(name, single, state, group, slot.parameter) != "keep":
                problem.rounded_states.add(name)
    return problem


class _TestProblem:
    """A made-up gradient of norm 1, and a loss that is unrelated to it.

    Args:
        optimizer: its parameters get the gradients.
        change: how much the gradient changes for a move of 1.
        loss_change: how much the loss changes from one evaluation to the next.

    Attributes:
        farthest: the largest distance of the parameters from their starts, in an evaluation or at the end.
        evaluations_left: how many more evaluations this step may take.
        endless: whether a step asked for more evaluations than it may take.
        rounded_states: names of states that ``"compact"`` and ``"8-bit"`` states round.
    """

    def __init__(self, optimizer: Optimizer, change: float, loss_change: float) -> None:
        self._trained = [slot.parameter for slot in slots(optimizer) if slot.parameter.requires_grad]
        self._starts = [parameter.detach().clone() for parameter in self._trained]
        self._size = sum(parameter.numel() for parameter in self._trained) ** -0.5
        self._change, self._loss_change = change, loss_change
        self._loss = _LOSS
        self.farthest = 0.0
        self.endless = False
        self.rounded_states: set[str] = set()
        self.evaluations_left = 0

    def closure(self) -> Tensor:
        if self.evaluations_left == 0:
            raise _TooManyEvaluations
        self.evaluations_left -= 1
        self._loss += self._loss_change
        self.note_distance()
        for parameter, start in zip(self._trained, self._starts, strict=True):
            moved = parameter.detach() - start
            parameter.grad = moved.mul_(self._change).add_(_alternating(start), alpha=self._size)
        return torch.tensor(self._loss)

    def note_distance(self) -> None:
        self.farthest = max(self.farthest, float(self.move().norm()))

    def move(self) -> Tensor:
        pairs = zip(self._trained, self._starts, strict=True)
        return torch.cat([(parameter.detach() - start).flatten() for parameter, start in pairs])


def _alternating(like: Tensor) -> Tensor:
    flat = torch.ones(like.numel(), dtype=like.dtype)
    flat[1::2] = -1
    return flat.view(like.shape)


def _differ(one: _TestProblem, other: _TestProblem) -> bool:
    moves = one.move(), other.move()
    if one.endless or other.endless:
        return True
    larger = max(float(move.norm()) for move in moves)
    # `not <=` and not `>`, so that NaN counts as a difference.
    return not float((moves[0] - moves[1]).norm()) <= _TELLS * larger


def _options(mode: Mode, states: States) -> str:
    return f"compensation={mode!r}, states={states!r}"


def _named(rounded: Collection[str]) -> str:
    return f" (also its states {', '.join(sorted(rounded))})" if rounded else ""


def _remedy(mode: Mode, *, exact: bool) -> str:
    """The remedy, in the words of both the plugin (`compensation`) and `compensate` (`mode`)."""
    split = "compensation='split' (`mode` of `compensate`), which keeps the exact float32 weight"
    price = {"kahan": "for as many bytes", "split24": "for 1 byte a parameter more"}.get(
        mode, "for 2 bytes a parameter more"
    )
    wanted = [] if mode == "split" else [f"{split} {price}"]
    if exact:
        wanted.append("states='exact', which keeps the states in float32")
    return f"Write {', and '.join(wanted)}."
