"""Turns what a user gives as a source (paths, tables, lists) into a `Source`."""

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset

from lightning_memkit.data.sources.file_names import name_of, named_files
from lightning_memkit.data.sources.files import JsonLines, Texts
from lightning_memkit.data.sources.source import Listed, Source
from lightning_memkit.data.sources.standard_library import StandardLibrary
from lightning_memkit.data.sources.tables import is_table, table_of_dataset, table_of_files

_TABLES = (".parquet", ".arrow")
_ENDINGS = (".jsonl", ".txt", *_TABLES)
_WRITE_IT = "Write its documents into one of these."
_OBJECTS = "Write it as .jsonl: an object a line."
_UNPACK = "Unpack it first."
_REMEDIES = {
    **dict.fromkeys((".json", ".csv", ".tsv"), _OBJECTS),
    **dict.fromkeys((".gz", ".zip", ".zst", ".xz", ".bz2"), _UNPACK),
    ".ndjson": "Rename it to .jsonl.",
}


def source_of(source: Any) -> Source:
    """The source for ``python-stdlib``, a path, a table of ``datasets``, or a list of files, texts or records.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: the suffix is unknown, or a folder has no such file, or several kinds of them, or the records
            in memory have no numbers from 0.
    """
    if isinstance(source, (str, Path)) and str(source) == "python-stdlib":
        return StandardLibrary()
    if isinstance(source, (str, Path)):
        return _of_path(Path(source))
    if is_table(source):
        return table_of_dataset(source)
    if hasattr(source, "iloc") and getattr(source, "ndim", 2) == 1:
        source = source.tolist()  # a pandas Series has numbers of its own
    if files := named_files(source):
        return _of_listed(files)
    _refuse_unnumbered(source)
    # A torch IterableDataset has a `__getitem__`, too, but it raises.
    return Listed(list(source) if isinstance(source, IterableDataset) else source)


def _refuse_unnumbered(source: Any) -> None:
    """Raise for records in memory that can't be read by their number."""
    kind = type(source).__name__
    if isinstance(source, Set):
        remedy = "a set has no order that a resume could find again; give sorted(source)"
    elif isinstance(source, Mapping):
        remedy = "a mapping of columns is no list of records; give datasets.Dataset.from_dict(source)"
    elif hasattr(source, "iloc"):
        remedy = 'its numbers are those of columns; give source.to_dict("records")'
    elif not hasattr(source, "__getitem__") and not isinstance(source, IterableDataset):
        remedy = "its documents have no numbers; give list(source)"
    else:
        return
    raise ValueError(f"The source is a {kind}, whose documents can't be read by their number: {remedy}.")


def _of_path(path: Path) -> Source:
    if path.is_dir():
        return _of_folder(path)
    _refuse_unreadable(path)
    return _of_files([path], path.name)


def _refuse_unreadable(path: Path) -> None:
    """Raise for what is no file of a known kind."""
    if not path.exists():
        pattern = "; patterns are not expanded: give the folder" if set(path.name) & {*"*?["} else ""
        raise FileNotFoundError(
            f"{str(path)!r} is neither a file nor a folder{pattern}; a source is 'python-stdlib', the path of a "
            ".jsonl, .parquet, .arrow or .txt file, a folder of them, or an object with input_ids."
        )
    if path.suffix not in _ENDINGS:
        raise ValueError(
            f"{path.name} ends in {path.suffix!r}; a source ends in .jsonl or .txt, or in .parquet or .arrow. "
            f"{_REMEDIES.get(path.suffix.lower(), _WRITE_IT)}"
        )


def _of_listed(files: list[Path]) -> Source:
    """The documents of several files, in the order of the list."""
    for path in files:
        if path.is_dir() or str(path) == "python-stdlib":
            raise ValueError(
                f"source is a list, and {str(path)!r} in it is {'a folder' if path.is_dir() else 'no file'}; a list "
                f"names files. Give source={str(path)!r} by itself, or the files."
            )
        _refuse_unreadable(path)
    kinds = sorted({file.suffix for file in files})
    if len(kinds) > 1:
        raise ValueError(
            f"source is a list of {' and '.join(kinds)} files; give files of one kind, or a mapping with one kind for "
            "each of train, validation and test."
        )
    return _of_files(files, name_of(files))


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
    return Texts(files, path.name, whole=True) if kinds == [".txt"] else _of_files(files, path.name)


def _of_files(files: list[Path], name: str) -> Source:
    if files[0].suffix == ".txt":
        return Texts(files, name)
    return JsonLines(files, name) if files[0].suffix == ".jsonl" else table_of_files(files, name)
