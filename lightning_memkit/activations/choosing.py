"""Chooses which operator outputs to keep: the least recomputation time for a number of bytes, over all blocks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_memkit.activations.cuts import hull
from lightning_memkit.activations.profiling import OperatorCost
from lightning_memkit.activations.tape import RECORDING_SECONDS, RUNNING_AGAIN_SECONDS

_BINS = 4000
_EXACT_UP_TO = 160  # operators of a block; above it, candidates are ranked once instead of after every choice


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorChoice:
    """One way to run a block.

    Args:
        keep: indices of the operators whose outputs stay in memory; None runs the block without
            checkpointing.
        size_bytes: the bytes that stay in memory, without the block's inputs.
        seconds: the time it adds to the plain forward.
        whole: the block keeps nothing, and its Python code is run again instead of operators from a tape.
    """

    keep: frozenset[int] | None
    size_bytes: int
    seconds: float
    whole: bool = False


def choices(operators: Sequence[OperatorCost], *, whole: bool = False) -> list[OperatorChoice]:
    """The ways to run a block of which none is both larger and slower than another; the smallest first.

    If the host is the device, a way costs the time of the recomputed operators and of the tape. An accelerator
    and its host work in parallel: there the cost is the larger of the device's time (forward and recomputation)
    and the host's (launching both, and the tape), minus the same maximum for the plain forward. A tape costs the
    host 26 µs an operator, and 18 µs for each that is recomputed. Of the backward only recomputation is counted:
    if the backward's own kernels leave the host idle, a tape costs less than counted.

    Args:
        operators: those of the block.
        whole: also consider recomputing the whole block, which needs no tape; on an accelerator only.
    """
    everything = OperatorChoice(keep=None, size_bytes=sum(op.saved_bytes for op in operators), seconds=0.0)
    found = [everything]
    pinned = frozenset(index for index, op in enumerate(operators) if op.pinned)
    found += _growing(operators, pinned)
    for seconds in _prices(operators):
        found += [_choice(operators, keep | pinned) for keep in hull(tuple(operators), seconds)]
    if whole and not pinned and _has_queue(operators):
        again = _more_seconds(operators, range(len(operators)), taped=False)
        found.append(OperatorChoice(keep=frozenset(), size_bytes=0, seconds=again, whole=True))
    # The sort is stable: among equal ways a tape, which runs no Python again, comes before recomputing the
    # whole block.
    found.sort(key=lambda choice: (choice.size_bytes, choice.seconds))
    front: list[OperatorChoice] = []
    for choice in found:
        if not front or choice.seconds < front[-1].seconds:
            front.append(choice)
    return front


def choose(fronts: Sequence[Sequence[OperatorChoice]], budget_bytes: int) -> list[OperatorChoice]:
    """One choice per block, with the least time that fits the budget; the smallest of each if nothing fits."""
    least = [front[0] for front in fronts]
    spare = budget_bytes - sum(choice.size_bytes for choice in least)
    if spare <= 0:
        return least
    unit = max(1, -(-spare // _BINS))
    best = np.zeros(_BINS + 1)
    taken: list[np.ndarray] = []
    for front in fronts:
        times = np.full((len(front), _BINS + 1), np.inf)
        for row, choice in enumerate(front):
            # Rounded down per block and made up for below: rounded up, many blocks would waste much.
            width = -(-(choice.size_bytes - front[0].size_bytes) // unit)
            if width <= _BINS:
                times[row, width:] = best[: _BINS + 1 - width] + choice.seconds
        taken.append(times.argmin(axis=0))
        best = times.min(axis=0)
    chosen: list[OperatorChoice] = []
    left = _BINS
    for front, rows in zip(reversed(fronts), reversed(taken), strict=True):
        choice = front[int(rows[left])]
        left -= -(-(choice.size_bytes - front[0].size_bytes) // unit)
        chosen.append(choice)
    return chosen[::-1]


def _growing(operators: Sequence[OperatorCost], keep: frozenset[int]) -> list[OperatorChoice]:
    """Start from keeping nothing; each time keep the operator that saves the most time per byte."""
    steps = [_choice(operators, keep)]
    # What was overwritten can't be kept. Where just some of an operator's outputs were, the others can.
    candidates = {i for i, op in enumerate(operators) if i not in keep and not (op.lost and all(op.lost))}
    exact = len(operators) <= _EXACT_UP_TO
    by_host = sum(op.host_seconds - op.seconds for op in operators) > 0
    ranked = sorted(
        candidates,
        key=lambda i: (
            -(operators[i].host_seconds if by_host else operators[i].seconds) / (sum(operators[i].sizes) + 1)
        ),
    )
    while candidates:
        if exact:
            tried = [(_choice(operators, keep | {index}), index) for index in candidates]
            now = steps[-1]
            tried = [(c, i) for c, i in tried if c.seconds < now.seconds]
            if not tried:
                break
            choice, index = max(
                tried,
                key=lambda pair: (
                    (now.seconds - pair[0].seconds) / max(1, pair[0].size_bytes - now.size_bytes)
                ),
            )
        else:
            index = ranked.pop(0)
            choice = _choice(operators, keep | {index})
        candidates.discard(index)
        keep |= {index}
        steps.append(choice)
    return steps


def _choice(operators: Sequence[OperatorCost], keep: frozenset[int]) -> OperatorChoice:
    needed = _needed(operators, keep)
    held = {
        (index, position) for index in keep for position, saved in enumerate(operators[index].saves) if saved
    }
    held.update(place for index in needed for place in operators[index].inputs if place[0] in keep)
    return OperatorChoice(
        keep=keep,
        size_bytes=sum(operators[index].sizes[position] for index, position in held),
        seconds=_more_seconds(operators, needed, taped=True),
    )


def _prices(operators: Sequence[OperatorCost]) -> list[tuple[float, ...]]:
    """What making each operator again takes: the device, and beside one the host."""
    if not _has_queue(operators):
        return [tuple(operator.seconds + RUNNING_AGAIN_SECONDS for operator in operators)]
    return [
        tuple(operator.seconds for operator in operators),
        tuple(operator.host_seconds + RUNNING_AGAIN_SECONDS for operator in operators),
    ]


def _has_queue(operators: Sequence[OperatorCost]) -> bool:
    """Whether the operators run on an accelerator, in parallel to its host."""
    return any(op.host_seconds for op in operators)


def _more_seconds(operators: Sequence[OperatorCost], again: Iterable[int], *, taped: bool) -> float:
    """The time of the forward and of recomputing `again`, minus that of the plain forward; see `choices`."""
    run_again = [operators[index] for index in again]
    more = sum(op.seconds for op in run_again)
    taping = len(operators) * RECORDING_SECONDS + len(run_again) * RUNNING_AGAIN_SECONDS if taped else 0.0
    if not _has_queue(operators):
        return more + taping
    device, host = sum(op.seconds for op in operators), sum(op.host_seconds for op in operators)
    launching = sum(op.host_seconds for op in run_again)
    return max(device + more, host + launching + taping) - max(device, host)


def _needed(operators: Sequence[OperatorCost], keep: frozenset[int]) -> set[int]:
    """The operators to recompute: those that autograd saves and that are not kept, and all they depend on."""
    needed: set[int] = set()
    waiting = [index for index, op in enumerate(operators) if any(op.saves) and index not in keep]
    while waiting:
        index = waiting.pop()
        if index not in needed:
            needed.add(index)
            waiting.extend(
                earlier
                for earlier, position in operators[index].inputs
                if earlier not in keep or operators[earlier].is_lost(position)
            )
    return needed
