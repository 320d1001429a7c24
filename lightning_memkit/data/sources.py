"""Where documents come from, in parts that any process can read by itself.

A source names its contents, so that what was made of them can be kept, and hands out parts. A part is small (a range
of numbers, some lines, some texts) and is read where it is tokenised.
"""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset

from lightning_memkit.data.corpora import text_of
from lightning_memkit.data.store import TokenStore
from lightning_memkit.utilities.errors import MissingPackageError

_RECORDS_A_PART = 1000
_BYTES_A_PART = 2**20
_BLANK_LINES = re.compile(r"\n[ \t]*(?:\n[ \t]*)+")
_TABLES = (".parquet", ".arrow")
_ENDINGS = (".jsonl", ".txt", *_TABLES)

Record = Any  # a text, a mapping, or token ids
Numbered = tuple[int, Record]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some documents that stand one behind the other.

    Attributes:
        first: The number of the first: its line in a file, else its place from 0.
        content: What the source needs to read them.
        work: How much of ``Source.work`` they are.
    """

    first: int
    content: Any
    work: int


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
    def parts(self) -> Iterator[Part]:
        """All documents, in order."""

    @abstractmethod
    def records(self, part: Part) -> list[Numbered]:
        """The documents of a part, each with its number."""

    def columns(self, part: Part) -> Any:
        """The part as Arrow columns, where it is a table that holds token ids; else None."""
        return None

    def within(self, part: Part) -> str:
        """The file of the part, where there are several whose documents are numbered alike."""
        return ""


class JsonLines(Source):
    """A ``.jsonl`` file: an object a line; blank lines are passed over."""

    unit = "line"

    def __init__(self, path: Path) -> None:
        self.name, self._path = path.name, path
        self.work = path.stat().st_size
        self.identity = file_identity(path)

    def parts(self) -> Iterator[Part]:
        """Some lines each, as bytes."""
        with self._path.open("rb") as file:
            number = 1
            while lines := file.readlines(_BYTES_A_PART):
                yield Part(first=number, content=lines, work=sum(map(len, lines)))
                number += len(lines)

    def records(self, part: Part) -> list[Numbered]:
        """The objects of these lines."""
        lines = enumerate(part.content, part.first)
        return [(number, self._record(line, number)) for number, line in lines if line.strip()]

    def _record(self, line: bytes, number: int) -> Record:
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{self.name}, line {number} is not JSON: {error}.") from None
        if not isinstance(record, dict):
            raise ValueError(
                f"{self.name}, line {number} is no object (found: {type(record).__name__}); every line is one, with "
                "the fields of a document."
            )
        return record


class JsonLinesFiles(Source):
    """The ``.jsonl`` files of a folder, one behind the other."""

    unit = "line"

    def __init__(self, files: list[Path], name: str) -> None:
        self.name, self._files = name, [JsonLines(file) for file in files]
        self.work = sum(file.work for file in self._files)
        self.identity = [file.identity for file in self._files]

    def parts(self) -> Iterator[Part]:
        """Some lines of a file each."""
        for number, file in enumerate(self._files):
            yield from (replace(part, content=(number, part)) for part in file.parts())

    def records(self, part: Part) -> list[Numbered]:
        """The objects of these lines."""
        number, of_file = part.content
        return self._files[number].records(of_file)

    def within(self, part: Part) -> str:
        """The file's name."""
        return self._files[part.content[0]].name


class Texts(Source):
    """A ``.txt`` file, whose documents stand between blank lines, or a folder of them, each one document."""

    def __init__(self, path: Path) -> None:
        self.name, self._path = path.name, path
        self._files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
        self.work = sum(file.stat().st_size for file in self._files)
        self.identity = [file_identity(file) for file in self._files]

    def parts(self) -> Iterator[Part]:
        """Texts of about a megabyte together."""
        texts, size, first = [], 0, 0
        for text in self._texts():
            texts.append(text)
            size += len(text)
            if size > _BYTES_A_PART:
                yield Part(first=first, content=texts, work=size)
                first, texts, size = first + len(texts), [], 0
        if texts:
            yield Part(first=first, content=texts, work=size)

    def records(self, part: Part) -> list[Numbered]:
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


class Listed(Source):
    """Records that are in memory, or that a data set hands out by number."""

    def __init__(self, records: Any, *, name: str = "the source", keep: bool = True) -> None:
        self.name, self._records = name, records
        self.work = len(records)
        self._keep = keep

    @cached_property
    def identity(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """A hash of what they hold; reads them once."""
        if not self._keep:
            return None
        digest = hashlib.sha256()
        for part in self.parts():
            digest.update(repr(self.records(part)).encode())
        return digest.hexdigest()

    def parts(self) -> Iterator[Part]:
        """Ranges of numbers."""
        yield from _ranges(self.work)

    def records(self, part: Part) -> list[Numbered]:
        """The records of these numbers."""
        return [(number, self._records[number]) for number in range(*part.content)]


class StoredTexts(Source):
    """Texts in one flat array of bytes."""

    def __init__(self, texts: TokenStore, name: str) -> None:
        self.name, self._texts, self.identity = name, texts, name
        self.work = texts.documents

    def parts(self) -> Iterator[Part]:
        """Ranges of numbers."""
        yield from _ranges(self.work)

    def records(self, part: Part) -> list[Numbered]:
        """The texts of these numbers."""
        return [(number, text_of(self._texts, number)) for number in range(*part.content)]


class Table(Source):
    """A table of the ``datasets`` package, memory-mapped: a part is a range of rows, and no process copies it."""

    def __init__(self, table: Any, *, name: str, identity: Any = None) -> None:
        self.name, self._table = name, table.with_format("arrow")
        self.work = len(table)
        self.identity = identity if identity is not None else table._fingerprint

    def parts(self) -> Iterator[Part]:
        """Ranges of numbers."""
        yield from _ranges(self.work)

    def records(self, part: Part) -> list[Numbered]:
        """The rows of these numbers, a mapping each."""
        return list(enumerate(self._table[slice(*part.content)].to_pylist(), part.first))

    def columns(self, part: Part) -> Any:
        """The rows of these numbers as Arrow columns, where one holds token ids."""
        return self._table[slice(*part.content)] if "input_ids" in self._table.column_names else None


def source_of(source: Any) -> Source:
    """What to read of a path, a table of the ``datasets`` package, or a list of texts or records.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: the ending is unknown, or a folder has no such file, or several kinds of them.
        MissingPackageError: a table needs the ``datasets`` package.
    """
    if isinstance(source, (str, Path)):
        return _of_path(Path(source))
    if is_table(source):
        return Table(source, name="dataset")
    # torch's IterableDataset has a __getitem__, too, which raises.
    return Listed(list(source) if isinstance(source, IterableDataset) else source)


def is_table(source: Any) -> bool:
    """Whether this is a ``datasets.Dataset``; does not load the package."""
    return (
        type(source).__module__.split(".")[0] == "datasets"
        and hasattr(source, "with_format")
        and hasattr(source, "__len__")
    )


def file_identity(path: Path) -> list[Any]:
    """Path, size and time of the last change: what a file's contents follow from without reading them."""
    status = path.stat()
    return [str(path.resolve()), status.st_size, status.st_mtime_ns]


def _of_path(path: Path) -> Source:
    if path.is_dir():
        return _of_folder(path)
    if not path.exists():
        raise FileNotFoundError(
            f"{str(path)!r} is neither a file nor a folder; a source is 'python-stdlib', the path of a .jsonl, "
            ".parquet, .arrow or .txt file, a folder of them, or an object with input_ids."
        )
    makers: dict[str, Callable[[Path], Source]] = {".jsonl": JsonLines, ".txt": Texts}
    if path.suffix in makers:
        return makers[path.suffix](path)
    if path.suffix in _TABLES:
        return _table_files([path], path.name)
    raise ValueError(
        f"{path.name} ends in {path.suffix!r}; a source ends in .jsonl or .txt, or in .parquet or .arrow."
    )


def _of_folder(path: Path) -> Source:
    files = sorted(file for ending in _ENDINGS for file in path.glob(f"*{ending}"))
    kinds = sorted({file.suffix for file in files})
    if not kinds:
        raise ValueError(
            f"The folder {str(path)!r} holds no .jsonl, .parquet, .arrow or .txt file right in it; folders within it "
            "are not read. Give one of these, or a mapping with one for each of train, validation and test."
        )
    if len(kinds) > 1:
        raise ValueError(
            f"The folder {path.name!r} holds {' and '.join(kinds)} files; give a folder of one kind."
        )
    if kinds == [".jsonl"]:
        return JsonLinesFiles(files, path.name)
    return Texts(path) if kinds == [".txt"] else _table_files(files, path.name)


def _table_files(files: list[Path], name: str) -> Source:
    try:
        import datasets
    except ImportError:
        raise MissingPackageError("datasets", f"source={name!r}", "hf") from None
    try:
        if files[0].suffix == ".arrow":
            table = datasets.concatenate_datasets([datasets.Dataset.from_file(str(file)) for file in files])
        else:
            table = datasets.Dataset.from_parquet([str(file) for file in files])
    except Exception as error:  # of whatever kind: the package wraps what Arrow says
        reason = next(iter(str(error.__cause__ or error).splitlines()), "")
        raise ValueError(
            f"{name} can't be read as one table ({reason}); its files are whole and have the same columns, so write "
            "them anew, or give one of them."
        ) from error
    return Table(table, name=name, identity=[file_identity(file) for file in files])


def _ranges(count: int) -> Iterator[Part]:
    for begin, end in pairwise([*range(0, count, _RECORDS_A_PART), count]):
        yield Part(first=begin, content=(begin, end), work=end - begin)
