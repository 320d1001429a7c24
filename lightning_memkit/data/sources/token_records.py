"""Records that already are token ids: lists, arrays, tensors, or mappings with ``input_ids``."""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_memkit.data.batching.batch import IGNORED_LABEL
from lightning_memkit.data.sources.store import TokenStore, joined, offsets_of, token_type

_RECORDS_AT_ONCE = 10_000
_SHOWN = 40  # characters of a value in an error
_MASKS = ("completion_mask", "assistant_masks")

Column = tuple[
    NDArray[np.integer], NDArray[np.int64]
]  # values of all records concatenated, and how many each record has


def token_store(documents: Iterable[Any]) -> TokenStore:
    """A store of documents that already are token ids.

    A document is a sequence of token ids, or a mapping with ``input_ids``. The mapping may also have, of the
    same length, ``attention_mask`` (tokens with 0 are padding and are dropped), and either ``labels`` (the
    tokens themselves, -100 if not learned) or ``completion_mask`` or ``assistant_masks`` (0 if not learned).
    A 2-D array is one document per row.

    Raises:
        ValueError: a token id is negative or not an integer, a record has no ``input_ids``, columns differ in
            length, or labels differ from the input's tokens.
    """
    if isinstance(documents, TokenStore):
        return documents
    array = np.asarray(documents) if hasattr(documents, "__array__") else None
    if array is not None and array.ndim == 2:
        counts = np.full(len(array), array.shape[1], np.int64)
        return store_of_columns({"input_ids": (array.ravel(), counts)})
    return joined(_stores(_chunks(records_of(documents))))


def mixed(this: str, first: str) -> str:
    """The message for a document of one kind among those of the other: the vocabulary of the ids is unknown."""
    return (
        f"is {this}, and the first document is {first}: of whose vocabulary the ids are is not known, so they don't "
        "stand beside texts, in whichever order. Tokenise all documents or none; of records that have both, "
        "documents.kind='text' or 'input_ids' says which counts, in Python DocumentOptions(kind=...)."
    )


def shown(value: Any) -> str:
    """A value as JSON, truncated, with its type."""
    if value is None:
        return "null"
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return f"{text if len(text) <= _SHOWN else text[:_SHOWN] + '...'} ({type(value).__name__})"


def records_of(documents: Any) -> Iterator[Any]:
    """Every record; a torch ``Dataset`` is read by number, because iterating over it need not end."""
    if hasattr(documents, "__len__") and not hasattr(documents, "__iter__"):
        return (documents[number] for number in range(len(documents)))
    return iter(documents)


def store_of_columns(columns: dict[str, Column], first: int = 0) -> TokenStore:
    """A store of flat columns: ``input_ids``, and the optional columns beside it.

    Args:
        columns: by name, the values of all records concatenated, and how many each record has.
        first: the number of the first record, for errors.
    """
    ids, counts = columns["input_ids"]
    _check_ids(ids, first)
    for name, (_, others) in columns.items():
        if not np.array_equal(others, counts):
            at = int(np.flatnonzero(others != counts)[0])
            raise ValueError(
                f"Record {first + at} has {counts[at]} 'input_ids' and {others[at]} of {name!r}; they stand for the "
                "same tokens and are equally many."
            )
    learned = _learned(columns, ids, counts, first)
    if "attention_mask" in columns:
        is_real = columns["attention_mask"][0] != 0
        if not is_real.all():
            running = offsets_of(is_real)
            counts = np.diff(running[offsets_of(counts)])
            ids, learned = ids[is_real], None if learned is None else learned[is_real]
    vocabulary = int(ids.max()) + 1 if len(ids) else 0
    kind = token_type(vocabulary)
    return TokenStore(tokens=ids.astype(kind, copy=False), offsets=offsets_of(counts), learned=learned)


def _learned(
    columns: dict[str, Column], ids: NDArray, counts: NDArray[np.int64], first: int
) -> NDArray[np.bool_] | None:
    masks = [columns[name][0] != 0 for name in _MASKS if name in columns]
    if "labels" in columns:
        labels = columns["labels"][0]
        learned = labels != IGNORED_LABEL
        wrong = np.flatnonzero(learned & (labels != ids))
        if len(wrong):
            record = first + int(np.searchsorted(offsets_of(counts), wrong[0], "right")) - 1
            raise ValueError(
                f"Record {record} has the label {int(labels[wrong[0]])} at the token {int(ids[wrong[0]])}; labels "
                "stand at the position of their own token (the model shifts them) and are that token, or -100."
            )
        masks.append(learned)
    if not masks:
        return None
    return np.logical_and.reduce(masks)


def _stores(chunks: Iterable[list[Any]]) -> Iterator[TokenStore]:
    first = 0
    for records in chunks:
        yield store_of_records(records, first)
        first += len(records)


def store_of_records(records: Sequence[Any], first: int = 0) -> TokenStore:
    """A store of some records; ``first`` is the number of the first one, for errors."""
    fields = ("input_ids", "attention_mask", "labels", *_MASKS)
    rows: dict[str, list[NDArray]] = {"input_ids": []}
    for number, record in enumerate(records, first):
        if not hasattr(record, "keys"):
            record = {"input_ids": record}
        elif "input_ids" not in record:
            raise ValueError(
                f"Record {number} has the fields {sorted(record.keys())} and no 'input_ids'; tokenise all "
                "documents or none, or give the path of a .jsonl or .txt file."
            )
        for name in fields:
            if name in record:
                rows.setdefault(name, []).append(_row(record[name], name, number))
    for name, arrays in rows.items():
        if len(arrays) != len(records):
            raise ValueError(
                f"{len(arrays)} of {len(records)} records have {name!r}; give it with all of them or with none."
            )
    return store_of_columns({name: _flat(arrays) for name, arrays in rows.items()}, first)


def _row(values: Any, name: str, number: int) -> NDArray[np.integer]:
    array = np.asarray(values)
    if array.ndim != 1 or not (
        np.issubdtype(array.dtype, np.integer) or array.dtype == bool or array.size == 0
    ):
        what = f"Document {number}" if name == "input_ids" else f"{name!r} of document {number}"
        raise ValueError(
            f"{what} is {array.dtype} of shape {array.shape} ({shown(values)}); a document is one row of integers."
            + (
                " Texts don't stand beside ids: tokenise all documents or none."
                if isinstance(values, str)
                else ""
            )
        )
    return array.astype(np.int64, copy=False)


def _flat(arrays: list[NDArray]) -> Column:
    counts = np.array([len(array) for array in arrays], np.int64)
    return (np.concatenate(arrays) if arrays else np.zeros(0, np.int64)), counts


def _check_ids(ids: NDArray, first: int) -> None:
    if ids.size and not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"The documents from {first} on are {ids.dtype}; a document is one row of integers, its token ids."
        )
    if ids.size and int(ids.min()) < 0:
        raise ValueError(f"A token id is {int(ids.min())}; token ids are 0 or more.")
    if ids.size and int(ids.max()) >= 2**31:
        raise ValueError(f"A token id is {int(ids.max())}; token ids are below 2**31.")


def _chunks(records: Iterable[Any]) -> Iterator[list[Any]]:
    chunk: list[Any] = []
    for record in records:
        chunk.append(record)
        if len(chunk) == _RECORDS_AT_ONCE:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
