import sys

import pytest

from lightning_memkit.data.corpora import python_stdlib, read_texts, text_of, text_store


def texts(store) -> list[str]:
    return [text_of(store, document) for document in range(store.documents)]


def test_text_files_end_a_document_at_blank_lines(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\nstill one\n\n \t\n\ntwo ö\n\n", encoding="utf-8")
    assert texts(read_texts(path)) == ["one\nstill one", "two ö"]


def test_a_folder_holds_a_document_a_file(tmp_path):
    for name, text in (("b.txt", "second\n\nof two"), ("a.txt", "first"), ("c.md", "no text file")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert texts(read_texts(tmp_path)) == ["first", "second\n\nof two"]


def test_jsonl_holds_a_document_a_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"text": "one\\n\\nstill"}\n\n{"text": " "}\n{"text": "two", "id": 3}\n', encoding="utf-8"
    )
    assert texts(read_texts(path)) == ["one\n\nstill", "two"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "line 2 is not JSON"),
        (
            '{"body": "x"}',
            r"line 2 has no text under 'text' \(found: \['body'\]\).*documents\.text_field.*text_field=",
        ),
        ('{"text": 3}', "line 2 has no text"),
        ("[1]", "found: list"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_texts(path)


@pytest.mark.parametrize(
    ("name", "content"), [("a.txt", " \n\n"), ("a.jsonl", ""), ("a.jsonl", '{"text": ""}')]
)
def test_an_empty_corpus_is_refused(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match="holds no document"):
        read_texts(tmp_path / name)


def test_a_folder_without_text_files_says_so(tmp_path):
    (tmp_path / "a.md").write_text("x")
    with pytest.raises(ValueError, match=r"holds no \.txt file; each \.txt file right in it is one document"):
        read_texts(tmp_path)


def test_an_unknown_ending_and_an_absent_file_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(ValueError, match=r"ends in '\.csv'; a text source ends in \.jsonl or \.txt"):
        read_texts(tmp_path / "a.csv")
    with pytest.raises(FileNotFoundError, match="a source is 'python-stdlib'"):
        read_texts(tmp_path / "absent.txt")


def test_texts_come_back_as_they_were():
    documents = ["", "plain", "größer\n", "日本語"]
    assert texts(text_store(documents)) == documents


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
