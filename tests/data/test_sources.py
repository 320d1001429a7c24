import json
import os
import signal
import sys

import numpy as np
import pytest
from torch.utils.data import IterableDataset

from lightning_memkit.data.sources import tokenising
from lightning_memkit.data.sources.corpus import Corpus, shares_of
from lightning_memkit.data.sources.shares import DocumentOptions
from lightning_memkit.data.sources.store import TokenStore
from lightning_memkit.data.sources.token_records import token_store
from lightning_memkit.data.sources.tokenizers import ByteTokenizer


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def read(source, **options) -> TokenStore:
    return Corpus(tokenizer_name="bytes", options=DocumentOptions(**options)).read(source)


def texts(source, **options) -> list[str]:
    store = read(source, **options)
    return [ByteTokenizer().decode(store[number]) for number in range(store.documents)]


def test_text_files_end_a_document_at_blank_lines(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\nstill one\n\n \t\n\ntwo ö\n\n", encoding="utf-8")
    assert texts(path) == ["one\nstill one", "two ö"]


def test_a_folder_holds_a_document_a_file(tmp_path):
    for name, text in (("b.txt", "second\n\nof two"), ("a.txt", "first"), ("c.md", "no text file")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert texts(tmp_path) == ["first", "second\n\nof two"]


def test_jsonl_holds_a_document_a_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"text": "one\\n\\nstill"}\n\n{"text": " "}\n{"text": "two", "id": 3}\n', encoding="utf-8"
    )
    assert texts(path) == ["one\n\nstill", "two"]


GOOD = b'{"text": "fine"}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD + b"\0\0\0\0\n" + GOOD, "line 2 holds NUL bytes, as after a crash"),
        (GOOD + b'{"text": "a\0b"}\n', "line 2 holds NUL bytes"),
        ((GOOD * 2).decode().encode("utf-16"), r"line 1 is UTF-16 or UTF-32; convert the file \(iconv"),
        ((GOOD * 2).decode().encode("utf-16-le"), "line 1 is UTF-16 or UTF-32"),
        ((GOOD * 2).decode().encode("utf-16-be"), "line 1 is UTF-16 or UTF-32"),
        ((GOOD * 2).decode().encode("utf-32"), "line 1 is UTF-16 or UTF-32"),
        (GOOD + b'{"text": "caf\xe9"}\n', r"line 2 is not UTF-8 \(byte 13 is 0xe9\): convert the file"),
        (GOOD + b'{"text": "cut', "line 2 is not JSON, and the file ends there: it was cut off"),
        (b"\x1f\x8b\x08\0abc\n", "line 1 is compressed: unpack the file"),
        (b"PK\x03\x04abc", "line 1 is compressed"),
    ],
)
def test_what_is_no_text_is_told(tmp_path, content, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"a.jsonl, {message}"):
        read(path)


def test_a_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD)
    assert texts(path) == ["fine"]


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
        (
            '{"text": "x", "messages": []}',
            r"line 2 could be read as any of \['text', 'messages'\]; say which with documents.kind",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read(path)


@pytest.mark.parametrize(
    ("name", "content"), [("a.txt", " \n\n"), ("a.jsonl", ""), ("a.jsonl", '{"text": ""}')]
)
def test_an_empty_corpus_is_refused(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"{name}' holds 0 documents and no token; give at least one"):
        read(tmp_path / name)
    (tmp_path / "b.txt").write_text("")
    (tmp_path / "c.txt").write_text("")
    with pytest.raises(ValueError, match=r"The source 'b.txt and 1 more' holds 0 documents"):
        read([tmp_path / "b.txt", tmp_path / "c.txt"])


def test_a_folder_without_a_source_in_it_says_so(tmp_path):
    (tmp_path / "a.md").write_text("x")
    (tmp_path / "train").mkdir()
    with pytest.raises(
        ValueError, match=r"holds no \.jsonl, \.parquet, \.arrow or \.txt file right in it.*folders within"
    ):
        read(tmp_path)


def test_a_folder_of_jsonl_files_is_read_in_the_order_of_their_names(tmp_path, monkeypatch):
    for name, words in (("b.jsonl", ["three"]), ("a.jsonl", ["one", "two"])):
        (tmp_path / name).write_text("".join(json.dumps({"text": word}) + "\n" for word in words))
    assert texts(tmp_path) == ["one", "two", "three"]
    (tmp_path / "b.jsonl").write_text('{"text": "3"}\n')
    os.utime(tmp_path / "b.jsonl", ns=(1, 1))
    assert texts(tmp_path) == ["one", "two", "3"]
    monkeypatch.setattr(tokenising, "_ALONE_SECONDS", -1.0)
    (tmp_path / "c.jsonl").write_text('{"text": "four"}\n')
    assert texts(tmp_path, processes=2) == ["one", "two", "3", "four"]


@pytest.mark.parametrize(
    ("line", "message"),
    [('{"body": "x"}', "^b.jsonl, line 1 has no text"), ("{", "^b.jsonl, line 1 is not JSON")],
)
def test_a_bad_line_of_a_folder_is_named_with_its_file(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "b.jsonl").write_text(line)
    with pytest.raises(ValueError, match=message):
        read(tmp_path)


def test_a_folder_of_several_kinds_is_refused_and_none_is_passed_over(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "b.txt").write_text("two")
    with pytest.raises(ValueError, match=r"holds \.jsonl and \.txt files; give a folder of one kind"):
        read(tmp_path)


def test_texts_that_are_not_utf8_are_named_and_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes("\N{BYTE ORDER MARK}one".encode())
    assert texts(tmp_path / "a.txt") == ["one"]
    (tmp_path / "b.txt").write_bytes(b"one\xff")
    with pytest.raises(ValueError, match=r"b\.txt is not UTF-8 \(byte 3\); convert it"):
        read(tmp_path)


@pytest.mark.parametrize("kind", ["text", "prompt", "input_ids", "auto"])
def test_a_record_with_several_kinds_is_read_as_is_asked(kind):
    record = {"input_ids": [1, 2, 3], "text": "four", "prompt": "a", "completion": "b"}
    expected = {"text": 6, "prompt": 4, "input_ids": 3, "auto": 3}
    assert read([record], kind=kind).lengths.tolist() == [expected[kind]]


@pytest.mark.parametrize("kind", ["text", "input_ids", "auto"])
def test_a_table_with_several_kinds_is_read_as_is_asked(kind):
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]], "text": ["four"]})
    assert read(table, kind=kind).lengths.tolist() == [{"text": 6, "input_ids": 3, "auto": 3}[kind]]


@pytest.mark.parametrize("records", [[[1, 2**31]], np.array([[2**40]]), [{"input_ids": [2**40]}]])
def test_token_ids_that_no_vocabulary_has_are_refused(records):
    with pytest.raises(ValueError, match=r"A token id is \d+; .* below 2\*\*31"):
        read(records)


def test_a_data_set_that_is_sized_and_can_only_be_iterated_is_read():
    class Sized(IterableDataset):
        def __init__(self, records):
            self.records = records

        def __len__(self):
            return len(self.records)

        def __iter__(self):
            return iter(self.records)

    assert texts(Sized(["one", "two"])) == ["one", "two"]
    assert read(Sized([[1, 2], [3]])).offsets.tolist() == [0, 2, 3]


def test_an_unknown_ending_and_an_absent_file_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(
        ValueError, match=r"ends in '\.csv'; a source ends in \.jsonl or \.txt, or in \.parquet"
    ):
        read(tmp_path / "a.csv")
    with pytest.raises(FileNotFoundError, match="a source is 'python-stdlib'"):
        read(tmp_path / "absent.txt")


def test_texts_and_records_in_memory_are_tokenised():
    assert texts(["one", "", "two"]) == ["one", "two"]
    assert texts([{"body": "one"}, {"body": "two"}], text_field="body") == ["one", "two"]


def test_arrays_of_tokens_are_taken_as_they_are():
    assert read(np.arange(6).reshape(2, 3)).offsets.tolist() == [0, 3, 6]
    assert read([np.array([5]), [70_000, 1]]).tokens.tolist() == [5, 70_000, 1]
    store = token_store([[1, 2]])
    assert read(store) is store


def written(path, columns: dict) -> None:
    """A table as Parquet, as an Arrow stream (which `datasets` writes) or as an Arrow file."""
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table(columns)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
        return
    new = pyarrow.ipc.new_file if path.stem.endswith("file") else pyarrow.ipc.new_stream
    with pyarrow.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a_file.arrow"])
def test_tables_give_texts_or_tokens_without_the_datasets_package(tmp_path, name, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    tokens = [[1, 2, 3], [4], [5, 6]]
    (tmp_path / "of_tokens").mkdir()
    written(tmp_path / name, {"text": ["one", "two", "drei"], "number": [1, 2, 3]})
    written(tmp_path / "of_tokens" / name, {"input_ids": tokens, "labels": [[-100, 2, 3], [-100], [5, 6]]})
    assert texts(tmp_path / name) == ["one", "two", "drei"]
    store = read(tmp_path / "of_tokens" / name)
    assert [store[number].tolist() for number in range(3)] == tokens
    assert store.learned is not None
    assert store.learned.tolist() == [False, True, True, False, True, True]


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_folder_of_tables_is_read_in_order(tmp_path, ending, processes, monkeypatch):
    monkeypatch.setattr(tokenising, "_ALONE_SECONDS", -1.0)
    words = [str(number) for number in range(2500)]
    for name, begin, end in (("a", 0, 1200), ("b", 1200, 2500)):
        written(tmp_path / f"{name}.{ending}", {"text": words[begin:end]})
    assert texts(tmp_path, processes=processes) == words


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_a_file_that_is_no_table_is_named(tmp_path, ending):
    written(tmp_path / f"a.{ending}", {"text": ["one"]})
    (tmp_path / f"b.{ending}").write_bytes((tmp_path / f"a.{ending}").read_bytes()[:150])
    with pytest.raises(ValueError, match=rf": b\.{ending} can't be read as a table .*; write it anew"):
        read(tmp_path)
    with pytest.raises(ValueError, match=rf"^b\.{ending} can't be read as a table"):
        read(tmp_path / f"b.{ending}")


def test_a_table_that_was_shuffled_and_cut_is_read_in_its_order():
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"input_ids": [[number] * 3 for number in range(2500)]})
    chosen = table.shuffle(seed=1).select(range(2100))
    store = read(chosen)
    assert [store[number].tolist() for number in range(2100)] == chosen["input_ids"][:]


def test_padding_of_tokens_that_are_padded_already_is_dropped():
    padded = [
        {"input_ids": [1, 2, 0, 0], "attention_mask": [1, 1, 0, 0], "labels": [-100, 2, -100, -100]},
        {"input_ids": [0, 3, 4, 5], "attention_mask": [0, 1, 1, 1], "labels": [-100, 3, -100, 5]},
    ]
    store = read(padded)
    assert (store.tokens.tolist(), store.offsets.tolist()) == ([1, 2, 3, 4, 5], [0, 2, 5])
    assert store.learned is not None
    assert store.learned.tolist() == [False, True, True, False, True]


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([{"input_ids": [1, 2], "labels": [2, 3]}], "Record 0 has the label 2 at the token 1; labels stand"),
        ([{"input_ids": [1, 2], "labels": [1]}], "Record 0 has 2 'input_ids' and 1 of 'labels'"),
        ([{"input_ids": [1], "labels": [1]}, {"input_ids": [1]}], "1 of 2 records have 'labels'"),
    ],
)
def test_columns_that_do_not_fit_are_refused(records, message):
    with pytest.raises(ValueError, match=message):
        read(records)


def test_the_cache_follows_the_file_the_tokenizer_and_the_options(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one", "body": "1"}\n')
    assert texts(path) == ["one"]
    with monkeypatch.context() as patched:
        patched.setattr(tokenising, "encoded", lambda *_: pytest.fail("tokenised again"))
        assert texts(path) == ["one"]
    assert texts(path, text_field="body") == ["1"]
    path.write_text('{"text": "two", "body": "1"}\n')
    os.utime(path, ns=(1, 1))
    assert texts(path) == ["two"]


def test_texts_in_memory_are_kept_by_their_contents(monkeypatch):
    assert texts(["one", "two"]) == ["one", "two"]
    with monkeypatch.context() as patched:
        patched.setattr(tokenising, "encoded", lambda *_: pytest.fail("tokenised again"))
        assert texts(["one", "two"]) == ["one", "two"]
    assert texts(["one", "deux"]) == ["one", "deux"]


def test_processes_change_nothing(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    words = [f"document {number} " + "x" * (number % 50) for number in range(20_000)]
    path.write_text("".join(json.dumps({"text": word}) + "\n" for word in words))
    alone = read(path, processes=1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    monkeypatch.setattr(tokenising, "_ALONE_SECONDS", -1.0)
    pools = []
    by_processes = tokenising._by_processes
    monkeypatch.setattr(tokenising, "_by_processes", lambda *given: pools.append(1) or by_processes(*given))
    together = read(path, processes=2)
    assert pools == [1]
    assert np.array_equal(together.tokens, alone.tokens)
    assert np.array_equal(together.offsets, alone.offsets)


def test_an_error_of_a_process_reaches_the_user(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\nbroken\n')
    monkeypatch.setattr(tokenising, "_ALONE_SECONDS", -1.0)
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        read(path, processes=2)


def test_an_error_of_reading_is_the_same_with_processes(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("one " * 300_000)
    (tmp_path / "b.txt").write_bytes(b"\xff")
    monkeypatch.setattr(tokenising, "_ALONE_SECONDS", -1.0)
    with pytest.raises(ValueError, match=r"^b\.txt is not UTF-8"):
        read(tmp_path, processes=2)


@pytest.mark.long
def test_a_process_that_dies_is_told_with_its_remedy(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    monkeypatch.setattr(tokenising, "_ALONE_SECONDS", -1.0)
    monkeypatch.setattr(tokenising, "_encode", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(RuntimeError, match=r"tokenised a\.jsonl died.*documents\.processes.*SIGKILL"):
        read(tmp_path / "a.jsonl", processes=2)


def test_a_mapping_names_its_shares():
    assert shares_of(["no mapping"]) is None
    assert shares_of({"train": 1, "predict": 2}) == {"train": 1, "predict": 2}
    with pytest.raises(ValueError, match=r"source has the keys \['train_sft'\]; a mapping gives"):
        shares_of({"train_sft": 1})
