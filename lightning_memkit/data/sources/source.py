"""Where documents come from, in parts that any process can read by itself.

A source identifies its contents, so that their tokens can be cached, and yields parts. A part is small (a
range of numbers, some lines, some texts) and is read in the process that tokenizes it.
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
    """Some consecutive documents.

    Attributes:
        first: The number of the first: its line in a file, otherwise its position from 0.
        content: What the source needs to read them.
        work: Their contribution to ``Source.work``.
        file: Their file, if the source has several.
    """

    first: int
    content: Any
    work: int
    file: str = ""


class Source(ABC):
    """Documents in a fixed order.

    Attributes:
        name: Part of a cache's name and of errors.
        unit: What a document's number counts, for errors.
        work: The sum of the work of all parts, for a progress bar.
        identity: What determines the contents; None if only reading them would tell.
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
        """The part as Arrow columns if it is a table with token ids, else None."""
        return None

    def where(self, part: SourcePart, number: int) -> str:
        """The location of a document, for errors."""
        return f"{part.file or self.name}, {self.unit} {number}"


class Listed(Source):
    """Records in memory, or that a data set returns by number."""

    name = "the source"

    def __init__(self, records: Any) -> None:
        self._records = records
        self.work = len(records)

    @cached_property
    def identity(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """A hash of the records' contents; reads them once."""
        digest = hashlib.sha256()
        for part in self.parts():
            digest.update(repr(self.records(part)).encode())
        return digest.hexdigest()

    def parts(self) -> Iterator[SourcePart]:
        """Ranges of numbers."""
        for begin, end in pairwise([*range(0, self.work, RECORDS_A_PART), self.work]):
            yield SourcePart(first=begin, content=(begin, end), work=end - begin)

    def records(self, part: SourcePart) -> list[Numbered]:
        """The records with these numbers."""
        return [(number, self._records[number]) for number in range(*part.content)]


def file_identity(path: Path) -> list[Any]:
    """Path, size and modification time, which identify a file's contents without reading it."""
    status = path.stat()
    return [str(path.resolve()), status.st_size, status.st_mtime_ns]
