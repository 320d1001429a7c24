"""Documents in text files: a JSON object per line, or plain texts."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from lightning_memkit.data.sources.source import Numbered, Record, Source, SourcePart, file_identity

_BYTES_A_PART = 2**20
_BLANK_LINES = re.compile(r"\n[ \t]*(?:\n[ \t]*)+")


class JsonLines(Source):
    """``.jsonl`` files, concatenated: one object per line; blank lines are skipped."""

    unit = "line"

    def __init__(self, files: list[Path], name: str) -> None:
        self.name, self._files = name, files
        self.work = sum(file.stat().st_size for file in files)
        self.identity = [file_identity(file) for file in files]

    def parts(self) -> Iterator[SourcePart]:
        """Yield some lines of a file at a time, as bytes."""
        for path in self._files:
            with path.open("rb") as file:
                number = 1
                while lines := file.readlines(_BYTES_A_PART):
                    yield SourcePart(first=number, content=lines, work=sum(map(len, lines)), file=path.name)
                    number += len(lines)

    def records(self, part: SourcePart) -> list[Numbered]:
        """The objects of these lines."""
        lines = enumerate(part.content, part.first)
        return [(number, self._record(line, part, number)) for number, line in lines if line.strip()]

    def _record(self, line: bytes, part: SourcePart, number: int) -> Record:
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{self.where(part, number)} is not JSON: {error}.") from None
        if not isinstance(record, dict):
            raise ValueError(
                f"{self.where(part, number)} is no object (found: {type(record).__name__}); every line is one, with "
                "the fields of a document."
            )
        return record


class Texts(Source):
    """A ``.txt`` file whose documents are separated by blank lines, or a folder of files with one document each."""

    def __init__(self, path: Path) -> None:
        self.name, self._path = path.name, path
        self._files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
        self.work = sum(file.stat().st_size for file in self._files)
        self.identity = [file_identity(file) for file in self._files]

    def parts(self) -> Iterator[SourcePart]:
        """Yield texts of about a megabyte in total at a time."""
        texts, size, first = [], 0, 0
        for text in self._texts():
            texts.append(text)
            size += len(text)
            if size > _BYTES_A_PART:
                yield SourcePart(first=first, content=texts, work=size)
                first, texts, size = first + len(texts), [], 0
        if texts:
            yield SourcePart(first=first, content=texts, work=size)

    def records(self, part: SourcePart) -> list[Numbered]:
        """These texts."""
        return list(enumerate(part.content, part.first))

    def _texts(self) -> Iterator[str]:
        for file in self._files:
            try:
                text = file.read_text(encoding="utf-8-sig")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{file.name} is not UTF-8 (byte {error.start}); convert it, or leave it out."
                ) from None
            yield from [text] if self._path.is_dir() else _BLANK_LINES.split(text)
