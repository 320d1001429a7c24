"""A corpus that every machine has: the functions of the running Python's own standard library."""

import ast
import io
import os
import platform
import sysconfig
import textwrap
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path

from lightning_memkit.data.sources.source import Numbered, Source, SourcePart

_EXTRACTOR = 1  # part of the corpus's name: increase it when the documents change
_SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}


class StandardLibrary(Source):
    """The source code of every function outside the test suites, with its docstring; about 16,000 documents.

    Each method is a document; a function inside a function stays part of the outer one. If Python was
    installed without its sources, the texts of ``help()`` (``pydoc_data.topics``, about 80 documents) replace
    them, with a warning.

    Raises:
        ValueError: this Python has neither.
    """

    unit = "function"

    def __init__(self) -> None:
        self.name = self.identity = _name()
        self._files = sorted(_source_files(Path(sysconfig.get_path("stdlib"))))
        self.work = len(self._files) or 1

    def parts(self) -> Iterator[SourcePart]:
        """One module per part."""
        if not self._files:
            yield SourcePart(first=0, content=_help_topics(), work=1)
        for path in self._files:
            yield SourcePart(first=0, content=path, work=1, file=path.name)

    def records(self, part: SourcePart) -> list[Numbered]:
        """The module's functions."""
        content = part.content
        return list(enumerate(_functions_of(content) if isinstance(content, Path) else content))


def _name() -> str:
    """The name of this Python's corpus, whose contents vary by version."""
    return (
        f"python-stdlib-{platform.python_implementation()}-{platform.python_version()}-v{_EXTRACTOR}".lower()
    )


def _source_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _functions_of(path: Path) -> Iterator[str]:
    try:
        raw = path.read_bytes()
        text = raw.decode(tokenize.detect_encoding(io.BytesIO(raw).readline)[0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old modules have invalid escapes, which are not ours to report
            tree = ast.parse(text)
    except (OSError, SyntaxError, ValueError):  # templates that are not valid Python
        return
    # `ast` counts lines as the compiler does; `str.splitlines` would also break at form feeds.
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    for function in _outer_functions(tree):
        first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
        yield textwrap.dedent("\n".join(lines[first - 1 : function.end_lineno])) + "\n"


def _outer_functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        elif isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _outer_functions(child)


def _help_topics() -> list[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ValueError(
            "This Python has neither the sources of its standard library nor pydoc_data; "
            "give the path of a .jsonl or .txt file as the source."
        ) from None
    warnings.warn(
        f"This Python has no sources of its standard library; the {len(topics)} texts of help() take their "
        "place, a far smaller corpus. For more, give the path of a .jsonl or .txt file as the source.",
        stacklevel=2,
    )
    return list(topics.values())
