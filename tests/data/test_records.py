"""Records that can't be read say which, what they hold, the rule and the remedy; kinds that don't mix are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_memkit.data.sources import tokenising
from lightning_memkit.data.sources.corpus import Corpus
from lightning_memkit.data.sources.shares import DocumentOptions
from lightning_memkit.data.sources.store import TokenStore, joined
from lightning_memkit.data.sources.stream_source import StreamDocuments
from lightning_memkit.data.sources.surrogates import holds_half, without_halves
from lightning_memkit.data.sources.tokenizers import ByteTokenizer

TEXT, IDS = {"text": "hello"}, {"input_ids": [1, 2, 3]}
PROMPT = {"prompt": "a", "completion": "b"}


def read(source: Any, **options: Any) -> TokenStore:
    return Corpus(tokenizer_name="bytes", options=DocumentOptions(processes=1, **options)).read(source)


def written(path: Path, records: list[Any]) -> str:
    path.write_text("\n".join(json.dumps(record) for record in records), encoding="utf-8")
    return str(path)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("before", [0, 5])
@pytest.mark.parametrize(
    ("value", "is_shown"),
    [
        (None, "null"),
        (3, r"3 \(int\)"),
        (1.5, r"1\.5 \(float\)"),
        (True, r"true \(bool\)"),
        (["a", "b"], r'\["a", "b"\] \(list\)'),
        ({"de": "Hallo"}, r'\{"de": "Hallo"\} \(dict\)'),
        (["x" * 99], r'\["xxxxx.*\.\.\. \(list\)'),
    ],
)
def test_a_text_that_is_none_is_shown(tmp_path: Path, value: Any, is_shown: str, before: int) -> None:
    path = written(tmp_path / "a.jsonl", [*[TEXT] * before, {"text": value}, TEXT])
    rule = (
        rf"^a\.jsonl, line {before + 1} has no text: its 'text' is {is_shown}, and a text is a string .*leave"
    )
    with pytest.raises(ValueError, match=rule):
        read(path)
    with pytest.raises(ValueError, match=rf"document {before} has no text: its 'text' is {is_shown}"):
        read([*[TEXT] * before, {"text": value}, TEXT])


def test_other_fields_than_the_texts_are_named_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="line 2 has no messages: its 'messages' is null, and messages are a list"
    ):
        read(written(tmp_path / "a.jsonl", [TEXT, {"messages": None}]))
    with pytest.raises(ValueError, match="line 1 has no text: its 'body' is null"):
        read(written(tmp_path / "b.jsonl", [{"body": None}]), text_field="body")
    with pytest.raises(ValueError, match=r"line 4 has no text under 'text' \(found: \['body'\]\)"):
        read(written(tmp_path / "c.jsonl", [*[TEXT] * 3, {"body": "x"}, TEXT]))
    with pytest.raises(ValueError, match=r"document 1 has no text under 'text' \(found: null\)"):
        read(["hello", None])


@pytest.mark.parametrize("blank", ["", " ", "\n\t \n"])
def test_blank_texts_are_no_documents(tmp_path: Path, blank: str) -> None:
    assert read(written(tmp_path / "a.jsonl", [{"text": blank}, TEXT, {"text": blank}])).documents == 1


@pytest.mark.parametrize(
    ("value", "is_shown"),
    [
        (None, r"\(null\)"),
        ("ab", r'\("ab" \(str\)\)'),
        ([1.5], "float64"),
        ([[1]], r"\[\[1\]\]"),
        ([1, None], "null"),
    ],
)
def test_token_ids_that_are_none_are_shown_with_their_line(tmp_path: Path, value: Any, is_shown: str) -> None:
    with pytest.raises(ValueError, match=rf"^a\.jsonl, line 2: .*{is_shown}.*one row of integers"):
        read(written(tmp_path / "a.jsonl", [IDS, {"input_ids": value}, IDS]))


@pytest.mark.parametrize("other", [TEXT, PROMPT, {"messages": [{"role": "assistant", "content": "x"}]}])
@pytest.mark.parametrize("kind", ["file", "files", "list", "stream"])
@pytest.mark.parametrize("first", ["ids", "other"])
def test_token_ids_and_texts_do_not_mix_in_either_order(
    tmp_path: Path, other: dict[str, Any], kind: str, first: str
) -> None:
    records = [IDS, other] if first == "ids" else [other, IDS]
    source: Any = records
    if kind == "file":
        source = written(tmp_path / "a.jsonl", records)
    elif kind == "files":
        (tmp_path / "files").mkdir()
        for name, record in zip("ab", records, strict=True):
            written(tmp_path / "files" / f"{name}.jsonl", [record])
        source = str(tmp_path / "files")
    tokenizer = None if first == "ids" else ByteTokenizer()
    stream = StreamDocuments(source=records, tokenizer=tokenizer, options=DocumentOptions())
    with pytest.raises(ValueError, match=r"[Tt]okenise all documents or none|has no chat template"):
        joined(stream(0, 0)) if kind == "stream" else read(source)


@pytest.mark.parametrize("records", [["hello", [1, 2]], [[1, 2], "hello"]])
def test_bare_texts_and_ids_do_not_mix_either(records: list[Any]) -> None:
    with pytest.raises(ValueError, match="[Tt]okenise all documents or none"):
        read(records)


@pytest.mark.parametrize("records", [[TEXT, PROMPT], [PROMPT, TEXT]])
def test_texts_and_prompts_mix_in_either_order(tmp_path: Path, records: list[Any]) -> None:
    store = read(written(tmp_path / "a.jsonl", records))
    assert store.documents == 2
    assert store.learned is not None
    assert not store.learned.all()


def test_of_records_with_both_the_kind_says_which_counts(tmp_path: Path) -> None:
    both = {**TEXT, **IDS}
    path = written(tmp_path / "a.jsonl", [both, TEXT])
    assert read(path, kind="text").documents == 2
    for order in ([both, TEXT], [TEXT, both]):
        with pytest.raises(ValueError, match="documents.kind='text'"):
            read(written(tmp_path / "b.jsonl", order))


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("input_ids", [[1, 2], None, [3]]),
        ("input_ids", [[1, 2], [None, 2], [3]]),
        ("labels", [[1, 2], None, [3]]),
        ("attention_mask", [[1, 1], [1, None], [1]]),
        ("completion_mask", [[0, 1], [None, 1], [1]]),
        ("assistant_masks", [[False, True], [None, True], [True]]),
    ],
)
@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_columns_with_nulls_are_refused_with_their_document(
    tmp_path: Path, column: str, values: list[Any], ending: str
) -> None:
    datasets = pytest.importorskip("datasets")
    columns = {"input_ids": [[1, 2], [1, 2], [3]], column: values}
    path = str(tmp_path / f"a.{ending}")
    table = datasets.Dataset.from_dict(columns)
    if ending == "parquet":
        table.to_parquet(path)
    else:
        import pyarrow

        with pyarrow.OSFile(path, "wb") as sink, pyarrow.ipc.new_stream(sink, table.data.schema) as writer:
            writer.write_table(table.data.table)
    for source in (path, table):
        with pytest.raises(ValueError, match=f"document 1 has null in '{column}'.* leave the record out"):
            read(source)


def test_a_table_of_texts_and_ids_in_turns_is_refused(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"input_ids": [[1, 2], None], "text": [None, "hello"]})
    with pytest.raises(ValueError, match=r"has null in 'input_ids'.* tokenise all or none"):
        read(table)


@pytest.mark.parametrize("first", [0, 1])
def test_files_of_other_columns_are_no_table(tmp_path: Path, first: int) -> None:
    datasets = pytest.importorskip("datasets")
    contents = [{"text": ["x", "y"]}, {"input_ids": [[1, 2], [3]]}]
    (tmp_path / "files").mkdir()
    for name, content in zip("ab", (contents[first], contents[1 - first]), strict=True):
        datasets.Dataset.from_dict(content).to_parquet(str(tmp_path / "files" / f"{name}.parquet"))
    with pytest.raises(ValueError, match=r"^files can't be read as one table: b\.parquet has the columns"):
        read(str(tmp_path / "files"))


@pytest.mark.parametrize("sources", [([TEXT], [IDS]), ([[1, 2]], ["hello"])])
def test_sources_of_texts_and_of_ids_in_one_module_are_told(sources: tuple[Any, Any]) -> None:
    corpus = Corpus(tokenizer_name="bytes", options=DocumentOptions(processes=1))
    for source in (sources[0], sources[0]):
        assert corpus.read(source).documents == 1
    with pytest.warns(
        UserWarning, match="of whose vocabulary the ids are is not known. Tokenise all sources"
    ):
        corpus.read(sources[1])


def table_file(path: Path, columns: dict[str, Any]) -> str:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path.parent.mkdir(exist_ok=True)
    parquet.write_table(pyarrow.table(columns), path)
    return str(path)


@pytest.mark.parametrize("name", ["labels", "attention_mask", "completion_mask", "assistant_masks"])
@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, 0], "int64"),
        (["a", "b"], "string"),
        ([0.5, 1.0], "double"),
        ([None, None], "null"),
        ([[0.5, 1.0], [1.0]], "list<.*double>"),
        ([["a", "b"], ["c"]], "list<.*string>"),
        ([[[1, 2]], [[3]]], "list<.*list<.*int64>>"),
    ],
)
def test_a_column_of_another_type_is_refused_with_file_column_and_remedy(
    tmp_path: Path, name: str, values: list[Any], kind: str
) -> None:
    path = table_file(tmp_path / "a.parquet", {"input_ids": [[65, 66], [67]], name: values})
    with pytest.raises(
        ValueError,
        match=rf"^a\.parquet, document 0: the column '{name}' is of type {kind}, .* list of integers .*; write it so, "
        "or leave the column out or rename it",
    ):
        read(path)


@pytest.mark.parametrize("values", [[1, 2], [[1.0, 2.0], [3.0]]])
def test_token_ids_of_another_type_are_refused_alike(tmp_path: Path, values: list[Any]) -> None:
    path = table_file(tmp_path / "a.parquet", {"input_ids": values})
    with pytest.raises(ValueError, match=r"^a\.parquet, document 0: the column 'input_ids' is of type"):
        read(path)


def test_of_several_tables_the_file_is_named_with_its_own_numbers(tmp_path: Path) -> None:
    folder = tmp_path / "tables"
    table_file(folder / "a.parquet", {"input_ids": [[1, 2], [3]], "labels": [[1, 2], [3]]})
    for labels, what in (
        ([5, 6], r"^b\.parquet, document 0: the column 'labels' is of type int64"),
        ([[5], None], r"^b\.parquet, document 1 has null in 'labels'"),
        ([[5], [6, 6]], r"^b\.parquet: Record 1 has 1 'input_ids' and 2 of 'labels'"),
    ):
        table_file(folder / "b.parquet", {"input_ids": [[5], [6]], "labels": labels})
        with pytest.raises(ValueError, match=what):
            read(str(folder))


def test_columns_of_every_list_of_integers_are_read(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    for kind in (
        pyarrow.list_(pyarrow.int32()),
        pyarrow.large_list(pyarrow.uint16()),
        pyarrow.list_(pyarrow.int64(), 2),
    ):
        columns = {
            "input_ids": pyarrow.array([[1, 2], [3, 4]], kind),
            "attention_mask": [[True, True], [True, False]],
        }
        store = read(table_file(tmp_path / f"{kind.id}-{kind.value_type}.parquet", columns))
        assert store.tokens.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("source", "remedy"),
    [
        ({"a", "b"}, r"is a set, .*sorted\(source\)"),
        (frozenset([(1, 2)]), "is a frozenset"),
        ({"text": ["a", "b"]}, "is a dict, .*Dataset.from_dict"),
        ({"a": 1}.values(), r"is a dict_values, .*list\(source\)"),
    ],
)
def test_records_without_numbers_are_refused_with_the_remedy(source: Any, remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        read(source)


def test_a_series_is_read_in_its_order_and_a_frame_is_refused() -> None:
    pandas = pytest.importorskip("pandas")
    series = pandas.Series(["one", "two"], index=[7, 3])
    assert read(series).tokens.tolist() == read(["one", "two"]).tokens.tolist()
    with pytest.raises(ValueError, match="is a DataFrame, .*to_dict"):
        read(pandas.DataFrame({"text": ["one"]}))


HALF = "\ud83d x"


@pytest.mark.parametrize(
    ("record", "repaired", "what"),
    [
        ({"text": HALF}, {"text": "? x"}, "'text'"),
        ({"prompt": "a", "completion": HALF}, {"prompt": "a", "completion": "? x"}, "'completion'"),
    ],
)
def test_half_a_surrogate_pair_is_told_with_its_line(
    tmp_path: Path, record: dict[str, str], repaired: dict[str, str], what: str
) -> None:
    first = PROMPT if "prompt" in record else TEXT
    path = written(tmp_path / "a.jsonl", [first, record, record])
    with pytest.warns(
        UserWarning, match=rf"a\.jsonl, line 2: its {what} holds half of a surrogate pair"
    ) as said:
        store = read(path)
    assert len(said) == 1
    assert store.tokens.tolist() == read([first, repaired, repaired]).tokens.tolist()


def test_half_a_surrogate_pair_is_told_by_processes_and_of_bare_texts(monkeypatch) -> None:
    monkeypatch.setattr(tokenising, "_ALONE_SECONDS", 0.0)
    with pytest.warns(UserWarning, match="document 1: it holds half of a surrogate pair"):
        store = Corpus(tokenizer_name="bytes", options=DocumentOptions(processes=2)).read(["a", HALF])
    assert store.tokens.tolist() == read(["a", "? x"]).tokens.tolist()


def test_half_a_surrogate_pair_within_messages_is_told() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": HALF}]}]
    assert holds_half(messages)
    assert without_halves(messages) == [{"role": "user", "content": [{"type": "text", "text": "? x"}]}]
    assert not holds_half([{"role": "ü", "content": None}])
