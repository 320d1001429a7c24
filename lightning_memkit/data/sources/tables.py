"""Documents that are rows of a table: Parquet and Arrow files, and tables of the ``datasets`` package.

Arrow itself reads files, a thousand rows at a time and without a copy on disk; no other package is needed.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from lightning_memkit.data.sources.source import RECORDS_A_PART, Numbered, Source, SourcePart, file_identity


class TextTable(Source):
    """Rows of a table; a part is sent to other processes as Arrow's own bytes.

    Args:
        name: Part of a cache's name and of errors.
        identity: What determines the contents.
        rows: The number of rows.
        read: Yields the rows in order, as Arrow tables or record batches, each with its file if there are several.
    """

    def __init__(
        self, name: str, identity: Any, rows: int, read: Callable[[], Iterator[tuple[str, Any]]]
    ) -> None:
        self.name, self.identity, self.work, self._read = name, identity, rows, read

    def parts(self) -> Iterator[SourcePart]:
        """Yield a thousand rows at a time."""
        first, last_file = 0, ""
        for file, rows in self._read():
            if file != last_file:
                first, last_file = 0, file
            for begin in range(0, rows.num_rows, RECORDS_A_PART):
                some = rows.slice(begin, RECORDS_A_PART)
                yield SourcePart(first=first, content=_as_bytes(some), work=some.num_rows, file=file)
                first += some.num_rows

    def records(self, part: SourcePart) -> list[Numbered]:
        """The rows, each as a mapping."""
        return list(enumerate(_of_bytes(part.content).to_pylist(), part.first))

    def columns(self, part: SourcePart) -> Any:
        """The rows as Arrow columns if one column holds token ids, else None."""
        rows = _of_bytes(part.content)
        return rows if "input_ids" in rows.column_names else None


def is_table(source: Any) -> bool:
    """Whether a source is a ``datasets.Dataset``; does not import the package."""
    return (
        type(source).__module__.split(".")[0] == "datasets"
        and hasattr(source, "with_format")
        and hasattr(source, "__len__")
    )


def table_of_dataset(table: Any) -> TextTable:
    """A ``datasets.Dataset``, identified by its fingerprint."""
    return TextTable("dataset", table._fingerprint, len(table), partial(_of_dataset, table))


def table_of_files(files: list[Path], name: str) -> TextTable:
    """Parquet or Arrow files (in the stream or the file format), concatenated.

    Raises:
        ValueError: a file is neither, or has other columns than the first.
    """
    rows, first = 0, set()
    for path in files:
        columns, more = _read_or_refused(lambda path=path: _described(path), path, name)
        if rows and columns != first:
            raise ValueError(
                f"{name} can't be read as one table: {path.name} has the columns {sorted(columns)}, and "
                f"{files[0].name} {sorted(first)}; write them with the same ones, or give one of the files."
            )
        first, rows = columns, rows + more
    return TextTable(name, [file_identity(path) for path in files], rows, partial(_of_files, files, name))


def _of_dataset(table: Any) -> Iterator[tuple[str, Any]]:
    return (("", rows) for rows in table.with_format("arrow").iter(RECORDS_A_PART))


def _of_files(files: list[Path], name: str) -> Iterator[tuple[str, Any]]:
    for path in files:
        batches = iter(_batches(path))
        while (
            batch := _read_or_refused(lambda batches=batches: next(batches, None), path, name)
        ) is not None:
            yield path.name if len(files) > 1 else "", batch


def _batches(path: Path) -> Iterator[Any]:
    if path.suffix == ".parquet":
        from pyarrow.parquet import ParquetFile

        with ParquetFile(path) as file:
            yield from file.iter_batches(RECORDS_A_PART)
    else:
        yield from _mapped(path).to_batches()


def _described(path: Path) -> tuple[set[str], int]:
    """The names of a file's columns, and the number of its rows."""
    if path.suffix == ".parquet":
        from pyarrow.parquet import ParquetFile

        with ParquetFile(path) as file:
            return {*file.schema_arrow.names}, file.metadata.num_rows
    table = _mapped(path)
    return {*table.column_names}, table.num_rows


def _mapped(path: Path) -> Any:
    import pyarrow

    try:
        return pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))).read_all()
    except pyarrow.ArrowInvalid:
        return pyarrow.ipc.open_file(pyarrow.memory_map(str(path))).read_all()


def _read_or_refused(read: Callable[[], Any], path: Path, name: str) -> Any:
    try:
        return read()
    except Exception as error:  # Arrow's errors have no common base class
        reason = next(iter(str(error).splitlines()), "")
        of_several = "" if path.name == name else f"{name}: "
        raise ValueError(
            f"{of_several}{path.name} can't be read as a table ({reason}); write it anew, or leave it out."
        ) from error


def _as_bytes(rows: Any) -> bytes:
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, rows.schema) as writer:
        writer.write(rows)
    return sink.getvalue().to_pybytes()


def _of_bytes(content: bytes) -> Any:
    import pyarrow

    return pyarrow.ipc.open_stream(content).read_all()
