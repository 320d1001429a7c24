"""Identifies what a loader delivers, by options and checksums in its state; a resume with other data is refused.

Checksums cover every token, every label and the order of the rows. A mapped store's file already contains its
own; those of a store in memory cost one pass over it.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from lightning_memkit.data.packing.layout import Packing
from lightning_memkit.data.sources.checksums import checksum_of, crc_of

_WHAT = {
    "tokens_crc": "documents (their tokens or which of them are labels)",
    "rows_crc": "documents in each row",
}


def rows_crc(packing: Packing) -> str:
    """Checksum (eight digits) of which chunks of which documents are in which row, whatever the arrays' dtypes."""
    arrays = (packing.offsets, packing.documents, packing.starts, packing.lengths)
    return checksum_of(crc_of(array, np.int64) for array in arrays)


def with_usual(state: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """A saved state with defaults for missing entries; warns of a state of an earlier version."""
    if "tokens_crc" in state:
        return {**usual, **state}
    warnings.warn(
        "The loader's state is of an earlier version, which noted counts alone: it is not known whether documents, "
        "padding and the number of ranks are the same. Resume with those that training began with.",
        stacklevel=3,
    )
    return dict(state)


def refuse_other_kind(state: Mapping[str, Any], *, is_stream: bool) -> None:
    """Raise if the state belongs to a stream and the source is none, or vice versa."""
    kinds = {False: ("batches_done", "documents that are all there"), True: ("position", "a stream")}
    (entry, now), (_, then) = kinds[is_stream], kinds[not is_stream]
    if entry not in state:
        raise ValueError(
            f"The loader's state is of {then}, and the source is {now}, so its position means nothing here. Resume "
            "with the earlier source, or load the weights alone."
        )


def refuse_other_data(
    state: Mapping[str, Any], identity: Mapping[str, Any], words: Mapping[str, Any] | None = None
) -> None:
    """Raise if a loader's saved state belongs to other data than `identity`.

    Entries that a state of an earlier version lacks are not compared.

    Args:
        state: As saved.
        identity: What is delivered now.
        words: What else the data are made from now; explains to the reader why the data differ, but is never
            a reason by itself.

    Raises:
        ValueError: it names what differs.
    """
    differing = differences(state, identity)
    if not differing:
        return
    causes = differences(state.get("made_from") or {}, words or {})
    because = f" What they are made from differs: {'; '.join(causes)}." if causes else ""
    raise ValueError(
        f"The loader's state is of other data ({'; '.join(differing)}).{because} Resume with the same data and "
        "options, or load the weights alone."
    )


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The entries that both have with different values, in words."""
    return [
        f"other {_WHAT[name]}" if name in _WHAT else f"{name}: {then[name]} then, {value} now"
        for name, value in now.items()
        if name in then and then[name] != value
    ]


def identity_of_sampling(loader: DataLoader[Any], ranks: int) -> dict[str, Any]:
    """What determines the order of a loader's samples, as far as it is known; the same on every rank."""
    batches = loader.batch_sampler
    sampler: Any = loader.sampler if batches is None else getattr(batches, "sampler", batches)
    size, shares = getattr(batches, "batch_size", None), getattr(sampler, "num_replicas", None)
    told: dict[str, Any] = {"sampler": type(sampler).__name__}
    if hasattr(loader.dataset, "__len__"):
        told["samples"] = len(loader.dataset)  # pyright: ignore[reportArgumentType]
    if isinstance(size, int):
        told["samples_per_step"] = size * (shares or 1)
    if not isinstance(size, int) or shares is None:  # how the ranks divide the samples is up to the user
        told["ranks"] = ranks
    return told
