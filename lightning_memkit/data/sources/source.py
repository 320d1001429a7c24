"""Where documents come from, in parts that any process can read by itself.

A source names its contents, so that what was made of them can be kept, and hands out parts. A part is small (a range
of numbers, some lines, some texts) and is read where it is tokenised.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

RECORDS_A_PART = 1000

Record = Any  # a text, a mapping, or token ids
Numbered = tuple[int, Record]


@dataclass(frozen=True, kw_only=True)
class SourcePart:
    """Some documents that stand one behind the other.

    Attributes:
        first: The number of the first: its line in a file, else its place from 0.
        content: What the source needs to read them.
        work: How much of ``Source.work`` they are.
        file: The file that they stand in, where the source has several.
    """

    first: int
    content: Any
    work: int
    file: str = ""


class Source(ABC):
    """Documents in a fixed order.

    Attributes:
        name: Stands in the name of a cache and in errors.
        unit: What a document's number counts, for errors.
        work: What all parts add up to, for a progress bar.
        identity: What the contents follow from; None where nothing short of reading them tells.
    """

    name: str
    unit = "document"
    work: int
    identity: Any

    @abstractmethod
    def parts(self) -> Iterator[SourcePart]:
        """All documents, in order."""

    @abstractmethod
    def records(self, part: SourcePart) -> list[Numbered]:
        """The documents of a part, each with its number."""

    def columns(self, part: SourcePart) -> Any:
        """The part as Arrow columns, where it is a table that holds token ids; else None."""
        return None

    def where(self, part: SourcePart, number: int) -> str:
        """A document of a part, for errors."""
        return f"{part.file or self.name}, {self.unit} {number}"


class Listed(Source):
    """Records that are in memory, or that a data set hands out by number."""

    name = "the source"

    def __init__(self, records: Any) -> None:
        self._records = records
        self.work = len(records)

    @cached_property
    def identity(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """A hash of what they hold; reads them once."""
        digest = hashlib.sha256()
        for part in self.parts():
            digest.update(repr(self.records(part)).encode())
        return digest.hexdigest()

    def parts(self) -> Iterator[SourcePart]:
        """Ranges of numbers."""
        for begin, end in pairwise([*range(0, self.work, RECORDS_A_PART), self.work]):
            yield SourcePart(first=begin, content=(begin, end), work=end - begin)

    def records(self, part: SourcePart) -> list[Numbered]:
        """The records of these numbers."""
        return [(number, self._records[number]) for number in range(*part.content)]


def file_identity(path: Path) -> list[Any]:
    """Path, size and time of the last change: what a file's contents follow from without reading them."""
    status = path.stat()
    return [str(path.resolve()), status.st_size, status.st_mtime_ns]
