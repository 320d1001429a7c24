"""Search for configurations that fit, with few predictions: skip those that can't fit or be better."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from lightning_memkit.memory.units import format_bytes
from lightning_memkit.planning.budget import Goal
from lightning_memkit.planning.choices import ACTIVATIONS, ON_HOST, Choice, Family, is_lighter, refusal
from lightning_memkit.planning.long_rows import long_rows
from lightning_memkit.planning.problem import ChunkLimits, Problem, Row, UnavailableError
from lightning_memkit.planning.sizes import best_size, confirmed, smallest
from lightning_memkit.prediction.result import Prediction
from lightning_memkit.utilities.progress import ProgressBar

# Within a group with equal choices in these columns, the last family uses the least memory.
_APART = ("precision", "ranks", "offload", "gradients", "states")
_BUT_OFFLOAD = ("precision", "ranks", "gradients", "states")
_KEEPS_STATES = ("", ACTIVATIONS)  # offload choices
_LITTLE = 0.05  # fraction of a step's time that counts as a tie


def search(families: Sequence[Family], problem: Problem) -> tuple[tuple[Row, ...], dict[str, str]]:
    """All families as rows: first those that fit, best first; where none does, some with modules in chunks of tokens.

    Returns:
        The rows, and the columns in which nothing can be chosen here, with the reason.
    """
    with ProgressBar("planning", len(families), "configurations") as bar:

        def predict(family: Family, size: int, *chunks: ChunkLimits) -> Prediction:
            prediction = problem.predict(family, size, *chunks)
            taken = problem.taken_bytes(prediction)
            found = Row(
                family=family,
                micro_batch_size=size,
                parts=problem.parts(size),
                chunks=(*chunks, ChunkLimits())[0],
            )
            verdict = "fits" if taken <= problem.usable_bytes else "too large"
            bar.found(f"{format_bytes(taken):>10}  {verdict:<9}  {found.words}")
            return prediction

        watched = replace(problem, predict=predict)
        rows, missing = _searched(families, watched, bar)
        if rows[0].fits:
            return rows, missing
        in_chunks = long_rows(rows, watched)
        rows = sorted((*in_chunks, *rows), key=lambda row: _rank(row, problem.goal))
        return tuple(rows), missing


def _searched(
    families: Sequence[Family], problem: Problem, bar: ProgressBar
) -> tuple[tuple[Row, ...], dict[str, str]]:
    possible, rows = _possible(families, problem)
    missing, found = dict[str, str](), list[Row]()
    groups = [list(group) for _, group in groupby(possible, key=lambda one: _names(one, _APART))]
    too_much: dict[tuple[str, ...], str] = {}  # per kind, the leanest offload choice already known not to fit
    lasting: dict[tuple[str, ...], Mapping[str, int]] = {}  # per kind, what stays on the device
    for group in groups:
        bar.reach(len(rows))
        kind, left = _names(group[0], _BUT_OFFLOAD), _without(group, missing)
        if kind in lasting and group[0]["offload"].name in _KEEPS_STATES:
            reason = _more_than_lasts(group[0], lasting[kind], problem)
            if reason:
                rows += [_too_large(family, reason) for family in left]
                continue
        if too_much.get(kind, group[0]["offload"].name) != group[0]["offload"].name:
            reason = f"more than with {too_much[kind]}, which does not fit"
            rows += [_too_large(family, reason) for family in left]
            continue
        own = _of_one_group(left, problem, missing, found)
        rows += own
        if group[0]["offload"].name in _KEEPS_STATES:
            lasting.update((kind, row.prediction.lasting) for row in own if row.prediction is not None)
        most = [other for other in groups if _names(other[0], _BUT_OFFLOAD) == kind][-1]
        if most is group or kind in too_much or not any(row.prediction for row in own):
            continue
        least = _without(most, missing)[-1]
        if any(row.fits or _probably_fits_without_states(row, problem) for row in own):
            continue
        bound = problem.row(least, problem.sizes_of(least)[0])
        if bound.failed is None and not bound.fits:  # a step that fails tells nothing about the others
            too_much[kind] = least["offload"].name
    bar.reach(len(families))
    left = set(_without(families, missing))
    rows = [row for row in rows if row.family in left]
    failed = next((row.failed for row in rows if row.failed is not None), None)
    if failed is not None and not any(row.prediction is not None for row in rows):
        raise failed
    rows.sort(key=lambda row: _rank(row, problem.goal))
    while rows[0].fits and not rows[0].exact:  # predict the chosen configuration at its own micro-batch
        rows[0] = confirmed(rows[0], problem)
        rows.sort(key=lambda row: _rank(row, problem.goal))
    return tuple(rows), missing


def _possible(families: Sequence[Family], problem: Problem) -> tuple[list[Family], list[Row]]:
    """The families that may fit, and rows for those that can be rejected without a prediction."""
    refused = {family: refusal(family) for family in families}
    floors = {family: problem.floor(family) for family in families if not refused[family]}
    within = [family for family, least in floors.items() if least <= problem.usable_bytes]
    if not within:  # predict the smallest anyway, to report what it takes
        within = [family for family, least in floors.items() if least == min(floors.values())]
    chosen, rows = set(within), list[Row]()
    for family in families:
        if refused[family]:
            rows.append(Row(family=family, rejected=refused[family], rejected_as="impossible"))
        elif family not in chosen:
            what = "weights and one gradient" if family.is_released else "weights and gradients"
            reason = f"{what} alone take {format_bytes(floors[family])}"
            rows.append(_too_large(family, reason))
    return within, rows


def _without(families: Sequence[Family], missing: Mapping[str, str]) -> list[Family]:
    """The families that have the plain choice in the missing columns."""
    return [family for family in families if not any(_is_more(family[column]) for column in missing)]


def _is_more(choice: Choice) -> bool:
    return bool(choice.callbacks) or choice.optimizer is not None


def _names(family: Family, columns: Sequence[str]) -> tuple[str, ...]:
    return tuple(family[column].name for column in columns)


def _of_one_group(
    families: list[Family], problem: Problem, missing: dict[str, str], found: list[Row]
) -> list[Row]:
    """Rows of a group; its leanest family goes first, because if that does not fit, no other does."""
    idle = {family: _idle(family, problem, found) for family in families}
    rows = [_not_needed(family, reason) for family, reason in idle.items() if reason]
    left, least = [family for family in families if not idle[family]], None
    while least is None:
        left = _without(left, missing)
        if not left:
            return rows
        try:
            least = smallest(left[-1], problem)
        except UnavailableError as error:
            missing[error.column] = error.reason
        if least is not None and least.failed is not None:
            rows.append(least)
            left, least = left[:-1], None
    if not least.fits:
        reason = f"more than {least.family}, which does not fit"
        return [*rows, least, *(_too_large(family, reason) for family in left[:-1])]
    reason = _more_than_others(least, problem, found)
    if reason:
        return [*rows, least, *(_not_needed(family, reason) for family in left[:-1])]
    for family in left:
        reason = _idle(family, problem, found)
        rows.append(_not_needed(family, reason) if reason else best_size(family, problem))
        found.append(rows[-1])
    return rows


def _more_than_others(least: Row, problem: Problem, found: Sequence[Row]) -> str:
    """Why the others of a group, which use more memory than its least, are not needed; empty if they may be."""
    if problem.goal == "memory" and least.family.is_released:
        for row in found:
            if row.fits and row.taken_bytes <= least.taken_bytes and is_lighter(row.family, least.family):
                return f"more than {row.words}"
    return ""


def _more_than_lasts(family: Family, lasting: Mapping[str, int], problem: Problem) -> str:
    """Why no activations are few enough, if what stays on the device is too much by itself; else empty."""
    least, what = sum(lasting.values()), "weights and optimizer states"
    if not family.is_released:
        least += problem.floor(family) - lasting.get("weights", 0)
        what = "weights, gradients and optimizer states"
    if least * min(1.0, problem.residual) <= problem.usable_bytes:
        return ""
    return f"{what} alone take {format_bytes(least)}"


def _probably_fits_without_states(row: Row, problem: Problem) -> bool:
    """Whether it probably fits with states on the host: then that is predicted, and not what keeps the least."""
    if row.prediction is None or row.family["offload"].name not in _KEEPS_STATES:
        return False
    lasting = row.prediction.lasting
    states = sum(lasting.values()) - lasting.get("weights", 0)
    return states > 0 and row.taken_bytes - states <= problem.usable_bytes


def _too_large(family: Family, reason: str) -> Row:
    return Row(family=family, rejected=reason, rejected_as="too large")


def _not_needed(family: Family, reason: str) -> Row:
    return Row(family=family, rejected=reason, rejected_as="not needed")


def _idle(family: Family, problem: Problem, found: Sequence[Row]) -> str:
    """Why a family that computes more than a row that fits is not needed; empty if it might be better."""
    if problem.goal == "memory":
        return ""
    lighter = [row for row in found if row.fits and is_lighter(row.family, family)]
    if lighter and family["ranks"].name == ON_HOST:
        return f"not needed: {lighter[0].words} fits, and steps on the device"
    return next((reason for reason in map(_needs_no_more, lighter) if reason), "")


def _needs_no_more(row: Row) -> str:
    if row.parts == 1 and row.chunks.rows is None:
        return f"not needed: the whole batch fits with {row.family}"
    if row.gain <= _LITTLE:
        return f"slower: {row.words} fits, and more rows at a time gain nothing"
    return ""


def _rank(row: Row, goal: Goal) -> tuple[bool, float, float]:
    if goal == "memory":
        return (not row.fits, row.taken_bytes, row.seconds)
    return (not row.fits, row.seconds, row.taken_bytes)
