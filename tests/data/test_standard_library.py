import ast
import sys
import warnings

import pytest

from lightning_memkit.data.sources import standard_library
from lightning_memkit.data.sources.corpus import Corpus
from lightning_memkit.data.sources.shares import DocumentOptions
from lightning_memkit.data.sources.standard_library import StandardLibrary
from lightning_memkit.data.sources.tokenizers import ByteTokenizer

SOURCE = '''
import functools

@functools.cache
def outer(x):
    """Says "hello\\q"."""
    def inner():
        return x
    return inner

class Thing:
    if True:
        async def method(self):
            return 1

def after_a_form_feed():
\x0c
    return "ß"
'''


def standard_library_documents() -> list[str]:
    library = StandardLibrary()
    return [text for part in library.parts() for _, text in library.records(part)]


@pytest.fixture
def library(tmp_path, monkeypatch):
    monkeypatch.setattr(standard_library.sysconfig, "get_path", lambda _: str(tmp_path))
    return tmp_path


def test_functions_are_documents_once_and_test_suites_are_left_out(library):
    (library / "module.py").write_text(SOURCE, encoding="utf-8")
    for folder in ("test", "site-packages", "package"):
        (library / folder).mkdir()
        (library / folder / "f.py").write_text(f"def in_{folder[:4]}(): pass")
    documents = standard_library_documents()
    assert [text.split("(")[0] for text in documents] == [
        "@functools.cache\ndef outer",
        "async def method",
        "def after_a_form_feed",
        "def in_pack",
    ]
    assert "def inner" in documents[0]
    for text in documents:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the escape in `outer`
            ast.parse(text)


def test_sources_that_do_not_parse_are_passed_over(library):
    (library / "template.py").write_text("def {{ name }}(): pass")
    (library / "binary.py").write_bytes(b"\xff\xfe\x00")
    (library / "latin.py").write_bytes("# coding: latin-1\ndef f(): return 'ü'".encode("latin-1"))
    assert standard_library_documents() == ["def f(): return 'ü'\n"]


def test_without_sources_the_help_texts_take_their_place_and_that_is_said(library):
    with pytest.warns(UserWarning, match="no sources of its standard library"):
        documents = standard_library_documents()
    assert len(documents) > 50


def test_with_neither_it_says_what_to_do(library, monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ValueError, match=r"give the path of a \.jsonl or \.txt file"):
        standard_library_documents()


@pytest.mark.long
def test_the_standard_library_is_there_and_is_read_once(monkeypatch):
    store = Corpus(tokenizer_name="bytes", options=DocumentOptions()).read("python-stdlib")
    assert store.documents > 5000
    found = [ByteTokenizer().decode(store[number]) for number in range(store.documents)]
    assert any(text.startswith("def dedent(text):") for text in found)
    assert all("def " in text for text in found[:200])
    read = []
    functions_of = standard_library._functions_of
    monkeypatch.setattr(
        standard_library, "_functions_of", lambda path: read.append(path) or functions_of(path)
    )
    again = Corpus(tokenizer_name="bytes", options=DocumentOptions()).read("python-stdlib")
    assert again.documents == store.documents
    assert len(read) == 1  # which tells that they are texts
