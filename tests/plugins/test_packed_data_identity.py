"""A position means something in the same data only: what they deliver is compared, whole, and not their counts."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lightning_memkit.data.loading.batch_options import BatchOptions
from lightning_memkit.data.packing.pack import WorkLimit
from lightning_memkit.data.sources.shares import DocumentOptions
from lightning_memkit.plugins.data.packed_data import PackedDataModule
from tests.plugins.test_packed_data import documents

ALL = DocumentOptions(validation=0.0)
TEXTS = [f"the document of number {number} " + "x" * (number % 7) for number in range(40)]


def data_of(source: Any, **options: Any) -> PackedDataModule:
    data = PackedDataModule(source, **{"context": 48, "batch_size": 4, "documents": ALL, **options})
    data.setup()
    return data


def state_of(source: Any, **options: Any) -> dict[str, Any]:
    """After two batches."""
    data = data_of(source, **options)
    batches = iter(data.train_dataloader())
    next(batches), next(batches)
    return data.state_dict()


def resume(state: dict[str, Any], source: Any, **options: Any) -> int:
    """How many batches are left."""
    data = data_of(source, **options)
    data.load_state_dict(state)
    return len(list(data.train_dataloader()))


def written(folder: Path, texts: list[str], **more: Any) -> str:
    folder.mkdir(exist_ok=True)
    path = folder / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"text": text, **more}) for text in texts), encoding="utf-8")
    return str(path)


def texts_of(change: str) -> list[str]:
    changed = list(TEXTS)
    if change == "a character":
        changed[17] = changed[17].replace("document", "bocument")
    elif change == "two exchanged":  # of one length
        changed[3], changed[10] = changed[10], changed[3]
    elif change == "one more":
        changed.append("another")
    elif change == "one less":
        changed.pop()
    return changed


@pytest.mark.parametrize("kind", ["texts", "file", "stream"])
@pytest.mark.parametrize("change", ["nothing", "a character", "two exchanged", "one more", "one less"])
def test_other_texts_are_refused(tmp_path: Path, monkeypatch: Any, kind: str, change: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def source(folder: str, texts: list[str]) -> Any:
        if kind == "file":
            return written(tmp_path / folder, texts)
        return (lambda: iter(texts)) if kind == "stream" else texts

    options = {"packing": "stream"} if kind == "stream" else {}
    state = state_of(source("then", TEXTS), **options)
    now = source("now", texts_of(change))
    if change == "nothing":
        assert resume(state, now, **options) > 5
        return
    with pytest.raises(ValueError, match="of other data .*other documents|then, .* now"):
        resume(state, now, **options)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"packing": "none"}, "packing: bfd then, none now"),
        ({"packing": "stream"}, "packing: bfd then, stream now"),
        ({"padding": "bucket"}, "padding: longest then, bucket now"),
        ({"long_documents": "split"}, "long_documents: error then, split now"),
        ({"long_documents": "truncate"}, "long_documents: error then, truncate now"),
        ({"context": 56}, "context: 48 then, 56 now"),
        ({"work_limit": WorkLimit(most=48**2)}, r"work_limit: None then, WorkLimit\(most=2304"),
        ({"batch_size": 2}, "rows_per_step: 4 then, 2 now"),
        ({"batch_tokens": 500}, "tokens_per_step: 0 then, 500 now"),
        ({"batches": BatchOptions(multiple_of=8)}, "multiple_of: 1 then, 8 now"),
        ({"batches": BatchOptions(drop_last=True)}, "drop_last: False then, True now"),
        ({"documents": DocumentOptions(validation=0.0, seed=1)}, "seed: 0 then, 1 now"),
        ({"documents": DocumentOptions(validation=0.2)}, "made from differs: validation: 0.0 then, 0.2 now"),
        ({"documents": DocumentOptions(validation=0.0, limit=30)}, "limit: None then, 30 now"),
    ],
)
def test_other_options_are_refused_in_words(option: dict[str, Any], message: str) -> None:
    state = state_of(TEXTS)
    with pytest.raises(ValueError, match=message):
        resume(state, TEXTS, **option)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"context": 56}, "context: 48 then, 56 now"),
        ({"long_documents": "split"}, "long_documents: error then, split now"),
        ({"work_limit": WorkLimit(most=48**2)}, "work_limit: None then"),
        ({"batches": BatchOptions(multiple_of=8)}, "multiple_of: 1 then, 8 now"),
        ({"batches": BatchOptions(drop_last=True)}, "drop_last: False then, True now"),
        ({"documents": DocumentOptions(validation=0.0, seed=1)}, "seed: 0 then, 1 now"),
        (
            {"documents": DocumentOptions(validation=0.2)},
            "documents 0 to 39 are others .*validation: 0.0 then, 0.2 now",
        ),
    ],
)
def test_other_options_of_a_stream_are_refused_in_words(option: dict[str, Any], message: str) -> None:
    state = state_of(lambda: iter(TEXTS), packing="stream")
    with pytest.raises(ValueError, match=message):
        resume(state, lambda: iter(TEXTS), **{"packing": "stream", **option})


@pytest.mark.parametrize("kept", [1, 500, 512])
def test_a_stream_that_ends_before_the_position_is_refused(kept: int) -> None:
    """Its position is in the second window, of which the documents from 512 on are read again."""
    many = [f"the document of number {number}" for number in range(1500)]
    data = data_of(lambda: iter(many), packing="stream")
    batches = iter(data.train_dataloader())
    for _ in range(200):
        next(batches)
    state = data.state_dict()
    assert state["train_loader"]["position"]["first_document"] == 512
    assert resume(state, lambda: iter(many), packing="stream") == len(list(batches))
    with pytest.raises(ValueError, match="ends before its document 512, at which the position was taken"):
        resume(state, lambda: iter(many[:kept]), packing="stream")


def test_a_stream_and_a_list_do_not_take_each_others_position() -> None:
    stream: Any = lambda: iter(TEXTS)  # noqa: E731
    with pytest.raises(ValueError, match="is of a stream, and the source is documents that are all there"):
        resume(state_of(stream, packing="stream"), TEXTS, packing="stream")
    with pytest.raises(ValueError, match="is of documents that are all there, and the source is a stream"):
        resume(state_of(TEXTS, packing="stream"), stream, packing="stream")


def test_a_shuffled_order_is_not_gone_on_with_unshuffled() -> None:
    from lightning_memkit.data.loading.loader import LoaderOptions, PackedLoader

    rows: Any = data_of(TEXTS)._splits["train"]
    state = PackedLoader(rows, LoaderOptions(batch_size=4)).state_dict()
    with pytest.raises(ValueError, match="shuffle: True then, False now"):
        PackedLoader(rows, LoaderOptions(batch_size=4, shuffle=False)).load_state_dict(state)


def tokenizer(folder: Path, first: str) -> str:
    """A tokenizer of characters; of `first` the token is 3."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    letters = [first, *sorted(set("".join(TEXTS)) - {first})]
    vocabulary = {"<pad>": 0, "<unk>": 1, "<eos>": 2, **{letter: 3 + at for at, letter in enumerate(letters)}}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    whole = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>"
    )
    whole.save_pretrained(folder)
    return str(folder)


def test_another_tokenizer_is_refused_and_the_same_in_another_folder_is_not(tmp_path: Path) -> None:
    state = state_of(TEXTS, tokenizer=tokenizer(tmp_path / "first", "e"))
    assert resume(state, TEXTS, tokenizer=tokenizer(tmp_path / "moved", "e")) > 5
    other = tokenizer(tmp_path / "other", "x")  # equally many tokens in each document
    with pytest.raises(
        ValueError, match=r"other documents \(their tokens .*tokenizer: .*first then, .*other now"
    ):
        resume(state, TEXTS, tokenizer=other)


@pytest.mark.parametrize("kind", ["list", "stream"])
def test_other_labels_of_the_same_tokens_are_refused(kind: str) -> None:
    pairs = [{"prompt": text[:8], "completion": text[8:]} for text in TEXTS]
    source: Any = pairs if kind == "list" else lambda: iter(pairs)
    options = {} if kind == "list" else {"packing": "stream"}
    state = state_of(source, **options)
    unmasked = DocumentOptions(validation=0.0, mask_prompt=False)
    with pytest.raises(ValueError, match="mask_prompt: True then, False now"):
        resume(state, source, documents=unmasked, **options)


def test_ids_and_labels_that_are_given_are_compared() -> None:
    ids = documents(40)
    records = [{"input_ids": one, "labels": [-100, *one[1:]]} for one in ids]
    state = state_of(records)
    changed = [*records[:20], {**records[20], "labels": ids[20]}, *records[21:]]
    with pytest.raises(ValueError, match=r"other documents \(their tokens or which of them are labels\)"):
        resume(state, changed)
    assert resume(state, records) > 0


def test_moved_files_another_cache_and_none_are_accepted(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    state = state_of(written(tmp_path / "then", TEXTS))
    shutil.move(tmp_path / "then", tmp_path / "now")
    left = resume(state, str(tmp_path / "now" / "texts.jsonl"))
    shutil.rmtree(tmp_path / "cache")
    assert resume(state, str(tmp_path / "now" / "texts.jsonl")) == left
    assert resume(state, TEXTS) == left  # the same documents, from memory
    read_only = tmp_path / "a file"
    read_only.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(read_only))
    with pytest.warns(UserWarning, match="can't be written"):
        assert resume(state, str(tmp_path / "now" / "texts.jsonl")) == left


def test_what_does_not_change_a_batch_may_change() -> None:
    state = state_of(TEXTS)
    left = resume(state, TEXTS)
    others = BatchOptions(prefetch=5, host_memory="1GiB")
    assert resume(state, TEXTS, batches=others) == left
    assert resume(state, TEXTS, documents=DocumentOptions(validation=0.0, processes=1)) == left


def test_a_state_of_an_earlier_version_is_gone_on_with() -> None:
    state = state_of(TEXTS)["train_loader"]
    names = ("seed", "rows", "tokens", "rows_per_step", "tokens_per_step", "steps")
    kept = (*names, "epoch", "batches_done", "dealt")
    old = {"train_loader": {name: state[name] for name in kept}}
    with pytest.warns(UserWarning, match="of an earlier version, which noted counts alone"):
        assert resume(old, TEXTS) > 5
