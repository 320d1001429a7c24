"""Texts from files and from Python's own sources, as UTF-8 bytes in one flat store."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from lightning_memkit.data.cache import cached
from lightning_memkit.data.standard_library import corpus_name, standard_library_documents
from lightning_memkit.data.store import TokenStore, offsets_of

_BLANK_LINES = re.compile(r"\n[ \t]*(?:\n[ \t]*)+")


def python_stdlib() -> TokenStore:
    """The functions of the running Python's standard library; read once, then kept in the cache folder."""
    return cached(corpus_name(), lambda: text_store(standard_library_documents()))


def read_texts(path: str | Path, *, text_field: str = "text") -> TokenStore:
    """The documents of a file or folder, empty ones left out.

    * ``.jsonl``: a JSON object a line, whose ``text_field`` is a document.
    * ``.txt``: documents are separated by blank lines.
    * a folder: every ``.txt`` file in it is one document, whole, in the order of the names.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: the ending is another, a folder has no .txt file, a line is no such object, or no document is left.
    """
    path = Path(path)
    if path.is_dir():
        files = sorted(path.glob("*.txt"))
        if not files:
            raise ValueError(
                f"The folder {str(path)!r} holds no .txt file; each .txt file right in it is one document. For "
                "other texts give the path of a .jsonl or .txt file."
            )
        documents = (_read(file) for file in files)
    elif not path.exists():
        raise FileNotFoundError(
            f"{str(path)!r} is neither a file nor a folder; a source is 'python-stdlib', the path of a "
            ".jsonl or .txt file, a folder of .txt files, or an object with input_ids."
        )
    elif path.suffix == ".jsonl":
        documents = _jsonl(path, text_field)
    elif path.suffix == ".txt":
        documents = _BLANK_LINES.split(_read(path))
    else:
        raise ValueError(f"{path.name} ends in {path.suffix!r}; a text source ends in .jsonl or .txt.")
    store = text_store(document for document in documents if document.strip())
    if store.documents == 0:
        raise ValueError(f"{str(path)!r} holds no document; a corpus needs at least one that is not blank.")
    return store


def text_store(documents: Iterable[str]) -> TokenStore:
    """Texts as UTF-8 bytes, one behind the other."""
    encoded = [document.encode("utf-8", errors="replace") for document in documents]
    lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
    return TokenStore(tokens=np.frombuffer(b"".join(encoded), np.uint8), offsets=offsets_of(lengths))


def text_of(texts: TokenStore, document: int) -> str:
    """One document of a store of texts."""
    return texts[document].tobytes().decode("utf-8")


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _jsonl(path: Path, text_field: str) -> Iterator[str]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path.name}, line {number} is not JSON: {error}.") from None
            if not isinstance(record, dict) or not isinstance(record.get(text_field), str):
                found = sorted(record) if isinstance(record, dict) else type(record).__name__
                raise ValueError(
                    f"{path.name}, line {number} has no text under {text_field!r} (found: {found}); every "
                    "line is an object with one. Name another field with documents.text_field, in Python with "
                    "DocumentOptions(text_field=...)."
                )
            yield record[text_field]
