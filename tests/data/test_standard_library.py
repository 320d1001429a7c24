import ast
import sys
import warnings
from types import ModuleType

import pytest

from lightning_memkit.data import progress, standard_library
from lightning_memkit.data.standard_library import standard_library_documents

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


def test_a_slow_reading_shows_its_progress_and_loses_no_file(library, monkeypatch):
    for number in range(5):
        (library / f"m{number}.py").write_text(f"def f{number}(): pass")
    monkeypatch.setattr(progress, "_AFTER_SECONDS", -1.0)
    shown = []

    class Bar:
        task_ids = (0,)

        def start(self) -> None: ...

        def stop(self) -> None:
            shown.append("stopped")

        def add_task(self, description, total) -> None:
            shown.append((description, total))

        def update(self, task, completed) -> None:
            shown.append(completed)

    bars = ModuleType("rich.progress")
    monkeypatch.setattr(bars, "Progress", Bar, raising=False)
    monkeypatch.setitem(sys.modules, "rich.progress", bars)
    assert len(standard_library_documents()) == 5
    assert shown == [("Reading Python's standard library", 5), 1, 2, 3, 4, 5, "stopped"]
