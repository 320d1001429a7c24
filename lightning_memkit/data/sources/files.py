"""Documents in text files: a JSON object per line, or plain texts."""

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path

from lightning_memkit.data.sources.source import Numbered, Record, Source, SourcePart, file_identity

_BYTES_A_PART = 2**20
_COMPRESSED = (b"\x1f\x8b", b"PK\x03\x04", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ")
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
            # As json itself would, which guesses UTF-16 from NUL bytes. Halves of surrogate pairs are told of later.
            record = json.loads(line.removeprefix(codecs.BOM_UTF8).decode("utf-8", "surrogatepass"))
        except ValueError as error:
            raise ValueError(f"{self.where(part, number)} {_why_unreadable(line, error)}.") from None
        if not isinstance(record, dict):
            raise ValueError(
                f"{self.where(part, number)} is no object (found: {type(record).__name__}); every line is one, with "
                "the fields of a document."
            )
        return record


def _why_unreadable(line: bytes, error: ValueError) -> str:
    """What a line of JSONL is instead, and what to do about it."""
    if line.startswith(_COMPRESSED):
        return "is compressed: unpack the file (gunzip, unzip, zstd -d)"
    empty, other = sorted((line[::2].count(0), line[1::2].count(0)))[::-1]
    every_second = empty > len(line) // 4 and not other
    if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)) or every_second:
        return "is UTF-16 or UTF-32; convert the file (iconv -f UTF-16 -t UTF-8)"
    if 0 in line:
        return (
            "holds NUL bytes, as after a crash of what wrote it: leave the line out, or write the file again"
        )
    if isinstance(error, UnicodeDecodeError):
        return (
            f"is not UTF-8 (byte {error.start} is 0x{line[error.start]:02x}): convert the file "
            "(iconv -f LATIN1 -t UTF-8), or leave the line out"
        )
    if not line.endswith(b"\n"):
        return f"is not JSON, and the file ends there: it was cut off ({error}); leave the line out"
    return f"is not JSON: {error}; correct the line, or leave it out"


class Texts(Source):
    """``.txt`` files, concatenated; blank lines separate documents, unless each file is ``whole``: one document."""

    def __init__(self, files: list[Path], name: str, *, whole: bool = False) -> None:
        self.name, self._files, self._whole = name, files, whole
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
            yield from [text] if self._whole else _BLANK_LINES.split(text)
