"""Choose the rows of a batch to probe: different ones, with labels that distinguish the ways of weighing.

A mask here is any number of a row that is zero if the row does not count in the loss.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf, isfinite, isnan
from typing import Any

from torch import Tensor

from lightning_memkit.micro_batching import (
    IGNORED_LABEL,
    LABEL_NAMES,
    SplitError,
    SplittableBatch,
    WeighBy,
    Weigher,
    batch_size,
    find_labels,
    normalized,
    picked_rows,
    split_batch,
    weigher,
)
from lightning_memkit.micro_batching.parts.cut import Splitter
from lightning_memkit.micro_batching.shares.batch_numbers import BatchCount, counts_of
from lightning_memkit.micro_batching.splitting import named_tensors

# And below: instead of a number of probes, a row between two that are equal in a column of integers.
EQUAL_IDS = -1
# Numbers of rows and of probes: pairs that are unlike in the first tensors that differ between rows.
_UNLIKE_PAIRS = ((2, 1), (2, 3), (2, 5))
_MOST_EQUAL = 3  # columns whose equal rows are compared
_MOST_SORTED = 8  # rows that are run one by one to sort them by their losses
# Rows to compare before a size is known; the second number if the first runs out of memory.
PROBED_SAMPLES = 5, 2
_MOST_SAMPLES = 32  # rows to compare once a size is known
_COUNTED_ROWS = 256  # the most rows of a batch that are compared to choose the most different ones


def probed_rows(batch: Any, rows: int, split: Splitter | None, probes: int) -> Any:
    """Some rows of a batch: the most different ones if rows can be picked, else consecutive ones."""
    total = batch_size(batch)
    if rows >= total:
        return batch
    if split is None and not isinstance(batch, SplittableBatch):
        try:
            singles = split_batch(batch, [1] * total)
            chosen = _unlike(singles, rows, probes)
            return picked_rows(batch, chosen)
        except (SplitError, TypeError, ValueError, RuntimeError):
            pass  # the user's own structure, of which rows can't be picked: take consecutive ones
    before = _offset(probes, total - rows)
    sizes = [size for size in (before, rows, total - rows - before) if size > 0]
    return split_batch(batch, sizes, split=split)[1 if before else 0]


def in_order_of(small: Any, loss_of: Callable[[Any], float | None]) -> Any:
    """Sort rows by their own losses, the largest first, so that micro-batches differ most.

    This reveals a loss over the hardest rows only, which takes other rows if one micro-batch holds them all.
    Of the rows that count in every mask, one comes first and one last, so that both micro-batches count.
    """
    total = batch_size(small)
    if not 4 <= total <= _MOST_SORTED or isinstance(small, SplittableBatch):
        return small
    try:
        singles = split_batch(small, [1] * total)
        losses = [loss_of(single) for single in singles]
        if None in losses:
            return small
        known = {row: loss for row, loss in enumerate(losses) if loss is not None and isfinite(loss)}
        counted = _counted(singles, known)
        masks = _masks(counted) if known else []
        hardest = sorted(known, key=known.__getitem__, reverse=True)
        full = [row for row in hardest if known[row] and all(mask[row] for mask in masks)]
        if len(full) < 2:
            return small
        first, last = full[0], full[-1]
        others = dict.fromkeys(row for row in [*hardest, *range(total)] if row not in (first, last))
        return picked_rows(small, [first, *others, last])
    except (SplitError, TypeError, ValueError, RuntimeError):
        return small  # the user's own structure


def _unlike(singles: list[Any], rows: int, probes: int) -> list[int]:
    """Choose two rows that count in every mask, then those with the least and most of every number, then any.

    Of the two rows that count, one comes first and the other last, so that both micro-batches count. If only
    two rows are wanted, every other time the most different ones are taken instead: they may act on each
    other where rows of one kind don't (negatives that are mined for each positive).
    """
    total = len(singles)
    looked_at = range(0, total, -(-total // _COUNTED_ROWS))
    counted = _counted(singles, looked_at)
    masks = _masks(counted)
    # A number with few values is a mask or a class, whose extremes tell more.
    telling = sorted((n for n in counted.values() if len(set(n.values())) > 1), key=_different)
    if probes <= EQUAL_IDS:
        pair = _equal(singles[0], counted, EQUAL_IDS - probes) or [0, total - 1]
        between = next(row for row in [*looked_at, *range(total)] if row not in pair)
        return [pair[0], between, pair[1]]
    if rows == 2 and probes % 2 and telling:
        numbers = telling[probes // 2 % len(telling)]
        return [max(numbers, key=numbers.__getitem__), min(numbers, key=numbers.__getitem__)]
    evenly = dict.fromkeys((_offset(probes, total - 1) + step) % total for step in _spread(total, rows))
    place = {row: index for index, row in enumerate(evenly)}
    chosen = dict.fromkeys(
        sorted(looked_at, key=lambda row: (sum(not mask[row] for mask in masks), place.get(row, total)))[:2]
    )
    for row in [extreme(n, key=n.__getitem__) for n in telling for extreme in (max, min)]:
        if len(chosen) < max(rows - 1, min(rows, 3)):
            chosen.setdefault(row)
    for row in [*evenly, *range(total)]:
        if len(chosen) < rows:
            chosen.setdefault(row)
    first, last, *others = list(chosen)[:rows]
    return [first, *sorted(others), last]


def _counted(singles: list[Any], rows: Iterable[int]) -> dict[BatchCount, dict[int, float]]:
    """Every count of some rows; below all others where a row holds a NaN, as one without a label does."""
    numbers = {count: {row: count(singles[row]) for row in rows} for count in counts_of(singles[0])}
    return {
        count: {row: -inf if isnan(number) else number for row, number in own.items()}
        for count, own in numbers.items()
    }


def _equal(single: Any, counted: dict[BatchCount, dict[int, float]], place: int) -> list[int]:
    """Two rows with one id: equal in a column of integers, first in that with the most values; empty without one."""
    ids = {
        path
        for path, tensor in named_tensors(single, "")
        if tensor.numel() == 1 and not tensor.is_floating_point()
    }
    pairs: list[list[int]] = []
    for count, numbers in sorted(counted.items(), key=lambda item: -_different(item[1])):
        if count.kind == "sum" and count.path in ids and 1 < _different(numbers) < len(numbers):
            first: dict[float, int] = {}
            pairs.append(
                next([first[n], row] for row, n in numbers.items() if first.setdefault(n, row) != row)
            )
    return pairs[place] if place < len(pairs) else []


def few_rows(batch: Any) -> list[tuple[int, int]]:
    """The few rows that may show what drowns among more: their numbers, and the places for `probed_rows`."""
    equal = 0
    for _, tensor in named_tensors(batch, ""):
        is_integer = not (tensor.is_floating_point() or tensor.is_complex())
        if tensor.ndim and is_integer and tensor.numel() == len(tensor):
            equal += 1 < len(tensor.unique()) < len(tensor)
    return [*_UNLIKE_PAIRS, *((3, EQUAL_IDS - place) for place in range(min(equal, _MOST_EQUAL)))]


def _masks(counted: dict[BatchCount, dict[int, float]]) -> list[dict[int, float]]:
    """The numbers that are masks: counts of labels, sums of tensors that hold only 0 and 1, and what is no NaN."""
    found = []
    for count, numbers in counted.items():
        if count.kind == "sum" and -inf in numbers.values() and any(map(isfinite, numbers.values())):
            found.append({row: float(number > -inf) for row, number in numbers.items()})
        if min(numbers.values()) or not any(numbers.values()):
            continue
        same = counted.get(replace(count, kind="nonzero"), numbers)
        if count.kind == "labels" or (count.kind == "sum" and numbers == same):
            found.append(numbers)
    return found


def _different(numbers: dict[int, float]) -> int:
    return len(set(numbers.values()))


def _spread(total: int, rows: int) -> list[int]:
    """Distances from a first row that visit all rows of a batch, the first few evenly spread."""
    each = max(1, total // rows)
    return [step * each + step * each // total for step in range(total)]


def _offset(probes: int, free: int) -> int:
    """The first probed row: at the batch's start, at its end, or in the middle, in turn."""
    return (0, free, free // 2)[probes % 3]


def told_apart(small: Any, first: int, batch: Any) -> Any:
    """A copy of a batch whose labels distinguish the ways of weighing, if the batch uses ignored labels.

    A row of the first micro-batch keeps two labels: its last, and one at position 0, which losses that shift
    inside ignore. A row of the second keeps its last three. Then all ways give different weights, which shows
    even in bf16. Only label values of the batch are used, because others might be out of the loss's range.
    """
    everywhere, labels = find_labels(batch), find_labels(small)
    if everywhere is None or labels is None or not bool((everywhere == IGNORED_LABEL).any()):
        return small
    real = everywhere[everywhere != IGNORED_LABEL]
    if len(real) == 0:
        return small
    changed = labels.clone()
    if labels.ndim < 2:
        changed[changed == IGNORED_LABEL] = real[0]
        changed[first + 1 :: 2] = IGNORED_LABEL
    elif labels.ndim == 2 and labels.shape[1] > 3:
        changed[:] = IGNORED_LABEL
        for row, kept in enumerate(labels):
            places = (kept[1:] != IGNORED_LABEL).nonzero().flatten().tolist() or [kept.shape[0] - 2]
            chosen = [0, 1 + places[-1]] if row < first else [1 + place for place in places[-3:]]
            for place in chosen:
                changed[row, place] = kept[place] if kept[place] != IGNORED_LABEL else real[0]
    return _with_labels(small, labels, changed)


def _with_labels(batch: Any, labels: Tensor, changed: Tensor) -> Any:
    """A shallow copy of the batch with other labels."""
    if isinstance(batch, Mapping):
        replaced: Any = copy.copy(batch)
        replaced[next(name for name in LABEL_NAMES if name in batch)] = changed
        return replaced
    if isinstance(batch, (tuple, list)):
        items, kind = [*batch[:-1], changed], type(batch)
        return kind(*items) if hasattr(batch, "_fields") else kind(items)
    replaced = copy.copy(batch)
    name = next(name for name in LABEL_NAMES if getattr(batch, name, None) is labels)
    object.__setattr__(replaced, name, changed)
    return replaced


def weigh_differently(
    ways: Sequence[WeighBy | Weigher], batch: Any, micro_batch_size: int, split: Splitter | None
) -> bool:
    """Whether the remaining ways of weighing give a batch's micro-batches different weights."""
    if len(ways) < 2:
        return False
    total = batch_size(batch)
    sizes = [min(micro_batch_size, total)]
    sizes += [1] * (total - sizes[0])
    parts = split_batch(batch, sizes, split=split)
    shares = [normalized([float(weigher(way, batch)(part)) for part in parts]) for way in ways]
    return any(abs(a - b) > 1e-12 for other in shares[1:] for a, b in zip(shares[0], other, strict=True))


def numbers_of_rows(most: int, total: int, *, fewest: int, is_first: bool) -> list[int]:
    """The numbers of rows to try in turn, each enough for two micro-batches; empty if the batch has less."""
    least = 2 * fewest
    wanted = PROBED_SAMPLES if is_first else (_MOST_SAMPLES, *PROBED_SAMPLES)
    numbers = {min(max(min(samples, most), least), total) for samples in wanted}
    return sorted((rows for rows in numbers if rows >= least), reverse=True)
