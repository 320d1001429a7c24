"""Saved and allocated bytes by kind of operator: contraction, normalization, elementwise, other."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from lightning_memkit.memory.meter import Allocation

# The classes of Ivanov et al., Data Movement Is All You Need, MLSys 2021; all other operators are "other".
KINDS = {
    "contraction": "matrix products, convolutions, attention kernels, recurrent layers",
    "normalization": "layer, batch, group and RMS norms; softmax and its logarithm",
    "elementwise": "activation functions, sums of two tensors, dropout, casts and copies",
    "other": "embeddings, reductions, concatenation, indexing, new tensors",
}
_CONTRACTS = re.compile(
    r"(^|_)(mm|bmm|addmm|baddbmm|addbmm|mv|addmv|dot|vdot|matmul|linear|conv\w*|cudnn_convolution\w*|attention\w*|rnn\w*|gru\w*"
    r"|lstm\w*)(_|$)"
)
_NORMALIZES = re.compile(r"(layer|batch|group|instance|rms)_?norm|softmax|logsumexp")
_MAPS = re.compile(
    r"^(_to_copy|copy|clone|native_dropout\w*|_?fused_dropout|bernoulli|_foreach_(?!norm)\w*|_?fused_adam\w*)_?$"
)


@cache
def kind_of(operator: Any) -> str:
    """The kind of an operator, one of `KINDS`."""
    name = operator._schema.name.rpartition("::")[2]
    if _NORMALIZES.search(name):
        return "normalization"
    if _CONTRACTS.search(name):
        return "contraction"
    if torch.Tag.pointwise in operator.tags or _MAPS.match(name):
        return "elementwise"
    return "other"


@dataclass(frozen=True, kw_only=True)
class SavedBytes:
    """What some operators of a step have saved and allocated.

    Args:
        saved_at_peak: bytes saved for the backward at the step's peak.
        saved_at_most: the same at the moment when most bytes were saved.
        allocated: bytes allocated in the whole step.
    """

    saved_at_peak: int = 0
    saved_at_most: int = 0
    allocated: int = 0


def by_kind(records: Iterable[Allocation], peak_tick: int, most_tick: int) -> dict[str, SavedBytes]:
    """Saved and allocated bytes by kind of operator."""
    return _grouped(records, lambda one: kind_of(one.maker), peak_tick, most_tick, tuple(KINDS))


def by_module(records: Iterable[Allocation], peak_tick: int, most_tick: int) -> dict[str, SavedBytes]:
    """Saved and allocated bytes by module, in descending order of saved bytes."""
    found = _grouped(records, lambda one: one.origin, peak_tick, most_tick, ())
    return dict(sorted(found.items(), key=lambda item: (-item[1].saved_at_most, -item[1].allocated)))


def alike(modules: Mapping[str, SavedBytes]) -> dict[str, tuple[int, SavedBytes]]:
    """Sums over modules whose names differ only in numbers: `layers.*.mlp` with their count; sorted."""
    found: dict[str, tuple[int, SavedBytes]] = {}
    names: dict[str, str] = {}
    for name, one in modules.items():
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
        count, before = found.get(pattern, (0, SavedBytes()))
        names[pattern] = name
        found[pattern] = (
            count + 1,
            SavedBytes(
                saved_at_peak=before.saved_at_peak + one.saved_at_peak,
                saved_at_most=before.saved_at_most + one.saved_at_most,
                allocated=before.allocated + one.allocated,
            ),
        )
    summed = {names[pattern] if one[0] == 1 else pattern: one for pattern, one in found.items()}
    return dict(sorted(summed.items(), key=lambda item: -item[1][1].saved_at_most))


def _grouped(
    records: Iterable[Allocation], key: Any, peak_tick: int, most_tick: int, first: tuple[str, ...]
) -> dict[str, SavedBytes]:
    sums: dict[str, list[int]] = {name: [0, 0, 0] for name in first}
    for record in records:
        if record.maker is None:
            continue
        own = sums.setdefault(key(record), [0, 0, 0])
        own[2] += record.size_bytes
        if record.category == "saved_activations":
            own[0] += record.size_bytes * record.alive_at(peak_tick)
            own[1] += record.size_bytes * record.alive_at(most_tick)
    return {
        name: SavedBytes(saved_at_peak=at_peak, saved_at_most=at_most, allocated=allocated)
        for name, (at_peak, at_most, allocated) in sums.items()
    }
