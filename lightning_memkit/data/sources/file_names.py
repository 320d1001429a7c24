"""Tells a list of file names from a list of texts: a name that is learned as a text of a few letters is a mistake."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightning_memkit.utilities.given import shortened

_STDLIB = "python-stdlib"
_ENDINGS = (
    ".jsonl", ".json", ".ndjson", ".parquet", ".arrow", ".feather", ".txt", ".md", ".csv", ".tsv",
    ".gz", ".zst", ".xz", ".bz2", ".zip",
)  # fmt: skip
_LONGEST = 4096  # characters of a path, on Linux


def named_files(source: Any) -> list[Path] | None:
    """The files that a list names; None if the source is no list, or one of texts, records or token ids.

    All of them end as data files do, without a blank, or are there.

    Raises:
        ValueError: only some of the list are files.
    """
    if isinstance(source, np.ndarray) and source.ndim == 1 and source.dtype.kind in "UO":
        source = source.tolist()
    if not isinstance(source, (list, tuple)) or not all(
        isinstance(one, (str, os.PathLike)) for one in source
    ):
        return None
    other = next((one for one in source if not names_a_file(one) and not os.path.exists(one)), None)
    if other is None:
        return [Path(one) for one in source]
    # Among texts, one that only looks like a name may be a text. A file that is there is not.
    for one in source:
        if isinstance(one, os.PathLike) or (names_a_file(one) and (one == _STDLIB or os.path.isfile(one))):
            raise ValueError(
                f"source is a list of files and texts: {os.fspath(one)!r} is a file, and {shortened(other)} is none. "
                "Give a list of files, or one of texts; a text that is named like a file is a record: {'text': ...}."
            )
    return None


def names_a_file(text: Any) -> bool:
    """Whether a text is the name of a data file rather than a document."""
    if not isinstance(text, str):
        return isinstance(text, os.PathLike)
    if len(text) > _LONGEST or not text[-len(_STDLIB) :].lower().endswith((*_ENDINGS, _STDLIB)):
        return False
    return len(text.split()) == 1 or os.path.isfile(text)


def files_named_twice(source: Any) -> list[str]:
    """The files that a list names more than once."""
    counts = Counter(path.resolve() for path in named_files(source) or ())
    return [path.name for path, times in counts.items() if times > 1]


def name_of(files: Sequence[Path]) -> str:
    """What several files are called in errors and in the name of their cache."""
    more = len(files) - 1
    return files[0].name if not more else f"{files[0].name} and {more} more"
