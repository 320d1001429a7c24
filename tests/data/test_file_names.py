"""A list of file names is the files, and a list of texts is the texts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from lightning_memkit.data.batching.packed_rows import PackedRows
from lightning_memkit.data.batching.share_packing import SharePacking
from lightning_memkit.data.sources.corpus import Corpus
from lightning_memkit.data.sources.shares import DocumentOptions
from lightning_memkit.data.sources.source_of import source_of
from lightning_memkit.data.sources.tokenizers import ByteTokenizer


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """The current folder, with a cache of its own and files of two documents each."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("a", "b", "a b"):
        pair = [f"{name} {number}" for number in (1, 2)]
        Path(f"{name}.txt").write_text("\n\n".join(pair))
        Path(f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in pair))
        parquet.write_table(pyarrow.table({"text": pair}), f"{name}.parquet")
    Path("ids.jsonl").write_text(json.dumps({"input_ids": [97, 98]}))
    Path("notes.md").write_text("a note")
    Path("inner").mkdir()
    return tmp_path


def texts(source: Any) -> list[str]:
    store = Corpus(tokenizer_name="bytes", options=DocumentOptions()).read(source)
    return [ByteTokenizer().decode(store[number]) for number in range(store.documents)]


@pytest.mark.parametrize("ending", ["txt", "jsonl", "parquet"])
@pytest.mark.parametrize(
    "kind",
    [
        list,
        tuple,
        np.array,
        lambda names: [Path(name) for name in names],
        lambda names: [names[0], Path(names[1])],
    ],
    ids=["list", "tuple", "array", "paths", "both"],
)
def test_a_list_of_files_is_their_documents_in_order(ending, kind):
    assert texts(kind([f"b.{ending}", f"a.{ending}"])) == ["b 1", "b 2", "a 1", "a 2"]
    assert texts([f"a.{ending}"]) == texts(f"a.{ending}")
    assert texts([f"a.{ending}"] * 2) == ["a 1", "a 2", "a 1", "a 2"]


def test_a_file_with_a_blank_in_its_name_is_read_and_a_sentence_about_one_is_not():
    assert texts(["a b.txt"]) == ["a b 1", "a b 2"]
    assert texts(["I read no.txt"]) == ["I read no.txt"]


def test_token_ids_of_listed_files_are_taken_as_they_are():
    store = Corpus(tokenizer_name="bytes", options=DocumentOptions()).read(["ids.jsonl", "ids.jsonl"])
    assert store.tokens.tolist() == [97, 98] * 2


def test_listed_files_are_identified_as_a_folders_are():
    for name in ("one.jsonl", "two.jsonl"):
        Path("inner", name).write_text('{"text": "of a folder"}')
    listed = ["inner/one.jsonl", "inner/two.jsonl"]
    assert source_of(listed).identity == source_of("inner").identity
    assert source_of(listed[::-1]).identity != source_of("inner").identity
    assert len(source_of(listed).identity) == 2


@pytest.mark.parametrize(
    "documents",
    [
        ["one text", "another"],
        ["none.txt", "a text beside a word that ends like a file"],
        ["a.txt\nb.txt"],
        ["word", "another"],
        ["x" * 10_000, "nul\0byte"],
        [""],
    ],
)
def test_a_list_of_texts_is_the_texts(documents):
    assert texts([*documents, "end"]) == [*filter(None, documents), "end"]


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (["a.txt", "b.jsonl"], ValueError, r"a list of \.jsonl and \.txt files; give files of one kind"),
        (["none.jsonl"], FileNotFoundError, r"'none.jsonl' is neither a file nor a folder; a source is"),
        (["*.jsonl"], FileNotFoundError, r"nor a folder; patterns are not expanded: give the folder"),
        (["none.jsonl.gz"], FileNotFoundError, r"neither a file"),
        (["notes.md"], ValueError, r"notes.md ends in '.md'; .* Write its documents into one of these\."),
        (["inner"], ValueError, r"'inner' in it is a folder; .* Give source='inner' by itself"),
        (["a.txt", "inner"], ValueError, r"'inner' in it is a folder"),
        (["python-stdlib"], ValueError, r"'python-stdlib' in it is no file; .* by itself"),
        (
            ["some text", "a.txt"],
            ValueError,
            r"files and texts: 'a.txt' is a file, and 'some text' is none\. ",
        ),
        ([Path("none"), "text"], ValueError, r"files and texts: 'none' is a file, and 'text' is none"),
    ],
)
def test_a_list_that_can_be_neither_is_refused_with_the_remedy(source, error, message):
    with pytest.raises(error, match=message) as refused:
        texts(source)
    assert len(str(refused.value)) < 360


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("a.json", "an object a line"),
        ("a.csv", "an object a line"),
        ("a.jsonl.gz", "Unpack it first"),
        ("a.ndjson", r"Rename it to \.jsonl"),
        ("a.pdf", "Write its documents into one of these"),
    ],
)
def test_a_file_of_another_kind_is_refused_with_what_to_do_about_it(name, remedy):
    Path(name).write_text("[]")
    with pytest.raises(ValueError, match=f"{name} ends in .*{remedy}"):
        texts(name)


def packing(**documents: Any) -> SharePacking:
    return SharePacking(
        corpus=Corpus(tokenizer_name="bytes", options=DocumentOptions(**documents)),
        verify=True,
        context=64,
        packing="bfd",
        long_documents="error",
        work_limit=None,
        multiple_of=1,
        batch_tokens=None,
    )


def test_a_file_that_is_named_twice_is_told_where_documents_are_held_out():
    with pytest.warns(UserWarning, match=r"names a.txt more than once, .*some are held out and trained on"):
        shares = packing(validation=0.5).dealt(["a.txt", "./a.txt", "b.txt"])
    assert sum(rows.packing.documents.size for rows in shares.values() if isinstance(rows, PackedRows)) == 6
    packing(validation=0.0).dealt(["a.txt", "a.txt"])
    packing(validation=0.5).whole("train", ["a.txt", "a.txt"])


def test_a_stream_of_file_names_is_refused():
    with pytest.raises(ValueError, match=r"source gives 'a.txt' for a document, which is a file"):
        Corpus(tokenizer_name="bytes", options=DocumentOptions()).tokenizer_for_stream(
            lambda: iter(["a.txt"])
        )
    assert Corpus(tokenizer_name="bytes", options=DocumentOptions()).tokenizer_for_stream(
        lambda: iter(["no.txt"])
    )
