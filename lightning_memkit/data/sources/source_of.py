"""Turns what a user gives as a source (paths, tables, lists) into a `Source`."""

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset

from lightning_memkit.data.sources.files import JsonLines, Texts
from lightning_memkit.data.sources.source import Listed, Source
from lightning_memkit.data.sources.standard_library import StandardLibrary
from lightning_memkit.data.sources.tables import is_table, table_of_dataset, table_of_files

_TABLES = (".parquet", ".arrow")
_ENDINGS = (".jsonl", ".txt", *_TABLES)


def source_of(source: Any) -> Source:
    """The source for ``python-stdlib``, a path, a table of the ``datasets`` package, or a list of texts or records.

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
    if not path.exists():
        raise FileNotFoundError(
            f"{str(path)!r} is neither a file nor a folder; a source is 'python-stdlib', the path of a .jsonl, "
            ".parquet, .arrow or .txt file, a folder of them, or an object with input_ids."
        )
    if path.suffix not in _ENDINGS:
        raise ValueError(
            f"{path.name} ends in {path.suffix!r}; a source ends in .jsonl or .txt, or in .parquet or .arrow."
        )
    return Texts(path) if path.suffix == ".txt" else _of_files([path], path.name)


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
    return Texts(path) if kinds == [".txt"] else _of_files(files, path.name)


def _of_files(files: list[Path], name: str) -> Source:
    return JsonLines(files, name) if files[0].suffix == ".jsonl" else table_of_files(files, name)
