import sys

import pytest

from lightning_memkit.data.corpora import python_stdlib, text_of, text_store


def test_texts_come_back_as_they_were():
    documents = ["", "plain", "größer\n", "日本語"]
    store = text_store(documents)
    assert [text_of(store, document) for document in range(store.documents)] == documents


def test_the_standard_library_is_there():
    store = python_stdlib()
    assert store.documents > 5000
    found = [text_of(store, n) for n in range(store.documents)]
    assert any(text.startswith("def dedent(text):") for text in found)
    assert all("def " in text for text in found[:200])


def test_the_standard_library_is_read_once(monkeypatch):
    python_stdlib()  # fills the cache, if no other test did
    monkeypatch.delitem(sys.modules, "pydoc_data", raising=False)
    monkeypatch.setattr(
        "lightning_memkit.data.corpora.standard_library_documents", lambda: pytest.fail("read it again")
    )
    assert python_stdlib().documents > 5000
