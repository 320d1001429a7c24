"""The floor under activation checkpointing: the fewest bytes that any choice of operators saves at a price.

Of each operator it is decided whether its outputs are kept, made again, or neither. Autograd has to find what it saves
either kept or made again, and so does an operator that is made again with its inputs. Under these rules an integer
solver (HiGHS, by `scipy.optimize.milp`) finds the choice of the fewest bytes whose recomputation takes at most so many
seconds, over all blocks at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from lightning_memkit.activations.choosing import choices, choose
from lightning_memkit.activations.planned import BudgetPlan
from lightning_memkit.activations.profiling import OperatorCost
from lightning_memkit.activations.tape import RECORDING_SECONDS, RUNNING_AGAIN_SECONDS

_SOLVER_SECONDS, _GAP = 60.0, 1e-4
_BUDGETS = 2000  # that are tried


@dataclass(frozen=True, kw_only=True)
class Floor:
    """The fewest bytes that blocks save.

    Args:
        size_bytes: those of the best choice found.
        bound_bytes: no choice saves fewer; equal but for the solver's tolerance.
    """

    size_bytes: float
    bound_bytes: float


class _Program:
    """A minimisation over variables of 0 and 1."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.seconds: list[float] = []
        self.least: list[int] = []
        self.most: list[int] = []
        self.implied: list[tuple[int, int]] = []  # pairs of which the first is at most the second

    def variable(self, *, seconds: float = 0.0, least: int = 0, most: int = 1) -> int:
        """A new variable, without cost as yet."""
        self.costs.append(0.0)
        self.seconds.append(seconds)
        self.least.append(least)
        self.most.append(most)
        return len(self.costs) - 1

    def solved(self, seconds: float) -> Floor:
        """The least cost within so many seconds."""
        rows = np.repeat(np.arange(len(self.implied)), 2)
        columns = np.array(self.implied, dtype=int).reshape(-1)
        signs = np.tile([1.0, -1.0], len(self.implied))
        shape = len(self.implied), len(self.costs)
        within: Any = Bounds(np.array(self.least), np.array(self.most))  # pyright: ignore[reportArgumentType]
        found = milp(
            np.array(self.costs),
            constraints=[
                LinearConstraint(csr_array((signs, (rows, columns)), shape=shape), ub=0.0),
                LinearConstraint(np.array(self.seconds)[None] * 1e3, ub=seconds * 1e3),
            ],
            bounds=within,
            integrality=np.ones(len(self.costs)),
            options={"time_limit": _SOLVER_SECONDS, "mip_rel_gap": _GAP},
        )
        if found.x is None:
            raise RuntimeError(f"No choice was found within {seconds} s: {found.message}")
        return Floor(size_bytes=float(found.fun), bound_bytes=float(found.mip_dual_bound))


@dataclass(frozen=True, kw_only=True)
class TapeSeconds:
    """What a tape takes: to record an operator of a block that has one, and to run one again."""

    recording: float = 0.0
    again: float = 0.0


FREE, TAPE = TapeSeconds(), TapeSeconds(recording=RECORDING_SECONDS, again=RUNNING_AGAIN_SECONDS)


def floor_of(blocks: Sequence[Sequence[OperatorCost]], seconds: float, tape: TapeSeconds = FREE) -> Floor:
    """The fewest bytes that these blocks save, their inputs apart, if they take at most `seconds` more."""
    program = _Program()
    for operators in blocks:
        _add(program, operators, tape)
    return program.solved(seconds)


def _add(program: _Program, operators: Sequence[OperatorCost], tape: TapeSeconds) -> None:
    taped = program.variable(seconds=len(operators) * tape.recording)
    available: list[list[int]] = []  # each output: kept, or made again
    for operator in operators:
        again = program.variable(seconds=operator.seconds + tape.again, most=0 if operator.pinned else 1)
        program.implied.append((again, taped))
        available.append([])
        for position, (size, saved) in enumerate(zip(operator.sizes, operator.saves, strict=True)):
            if operator.is_lost(position):  # overwritten: it can only be made again
                available[-1].append(again)
                continue
            here = program.variable(least=int(saved))
            available[-1].append(here)
            program.costs[here] += size
            program.costs[again] -= size
            program.implied.append((again, here))
        program.implied += [(again, available[index][position]) for index, position in operator.inputs]


@dataclass(frozen=True, kw_only=True)
class AtPrice:
    """Saved bytes at a price, inputs of blocks and what is saved outside of them included.

    Args:
        ours: of the smallest budget whose choice takes no longer, by the same times.
        floor: of an integer solver's choice.
        untaped: the same if a tape took no time.
        everything: without checkpointing.
    """

    ours: int
    floor: float
    untaped: float
    everything: int


def at_price(plan: BudgetPlan, seconds: float) -> AtPrice:
    """What a measured model saves if its step may take `seconds` longer, and what any choice could."""
    blocks = [profile.operators for profile in plan.profiles]
    fronts = {operators: choices(operators) for operators in set(blocks)}
    saved = sum(profile.saved_bytes for profile in plan.profiles)
    least = saved
    for step in range(_BUDGETS):
        chosen = choose([fronts[operators] for operators in blocks], saved * step // _BUDGETS)
        if sum(choice.seconds for choice in chosen) <= seconds:
            least = min(least, sum(choice.size_bytes for choice in chosen))
    return AtPrice(
        ours=plan.fixed_bytes + least,
        floor=plan.fixed_bytes + floor_of(blocks, seconds, TAPE).size_bytes,
        untaped=plan.fixed_bytes + floor_of(blocks, seconds).size_bytes,
        everything=plan.fixed_bytes + saved,
    )
