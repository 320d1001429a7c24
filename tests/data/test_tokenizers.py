import sys

import numpy as np
import pytest

from lightning_memkit.data.sources.tokenizers import ByteTokenizer, HuggingFaceTokenizer, load_tokenizer
from lightning_memkit.utilities.errors import MissingPackageError

TEXTS = ["", "plain", "größer\n日本", "x"]


def test_bytes_stand_between_marks():
    store = load_tokenizer("bytes").tokenize(TEXTS)
    for number, text in enumerate(TEXTS):
        assert store[number].tolist() == [256, *text.encode(), 257]
    assert store.tokens.dtype == np.uint16


def test_bytes_decode_to_the_text():
    tokenizer = ByteTokenizer()
    store = tokenizer.tokenize(TEXTS)
    assert [tokenizer.decode(store[number]) for number in range(4)] == TEXTS
    assert tokenizer.decode([258, 104, 105]) == "hi"
    assert max(tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) < tokenizer.vocabulary_size


@pytest.fixture
def saved_tokenizer(tmp_path):
    """A small word tokenizer, trained here and saved as transformers saves one."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[UNK]": 0, "one": 1, "two": 2, "</s>": 3}, "[UNK]")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", eos_token="</s>")
    fast.save_pretrained(tmp_path)
    return str(tmp_path)


def test_a_hugging_face_tokenizer_ends_every_document(saved_tokenizer):
    tokenizer = HuggingFaceTokenizer(saved_tokenizer)
    store = tokenizer.tokenize(["one two one", "", "three"])
    assert [store[number].tolist() for number in range(3)] == [[1, 2, 1, 3], [3], [0, 3]]
    assert (tokenizer.vocabulary_size, tokenizer.pad_id, tokenizer.eos_id) == (4, 3, 3)
    assert tokenizer.decode([1, 2]) == "one two"


def test_half_a_surrogate_pair_is_a_question_mark_to_either(saved_tokenizer):
    assert ByteTokenizer().tokenize(["\ud83d"]).tokens.tolist() == [256, ord("?"), 257]
    assert HuggingFaceTokenizer(saved_tokenizer).tokenize(["one \ud83d"]).tokens.tolist() == [1, 0, 3]


def test_its_key_names_the_vocabulary(saved_tokenizer, tmp_path):
    key = HuggingFaceTokenizer(saved_tokenizer).key
    assert key == HuggingFaceTokenizer(saved_tokenizer).key
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace('"two"', '"deux"'))
    assert HuggingFaceTokenizer(saved_tokenizer).key != key


def test_an_absent_transformers_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        MissingPackageError, match=r"tokenizer='gpt2' needs .*`pip install transformers`.*'\.\[hf\]'"
    ):
        load_tokenizer("gpt2")


def test_an_absent_tokenizer_is_named_with_what_needs_none(tmp_path):
    (tmp_path / "absent").mkdir()
    with pytest.raises(ValueError, match=r"^tokenizer='.*absent' can't be loaded; .* or \"bytes\""):
        load_tokenizer(str(tmp_path / "absent"))


def test_what_lies_where_a_tokenizer_was_looked_for_is_told(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    for name, said in (
        (tmp_path / "modle", rf"There is no such folder; in {tmp_path} are model\.$"),
        (tmp_path / "model", r"The folder holds no tokenizer\.json, but config\.json; transformers says: "),
        (tmp_path / "model" / "config.json", r"It is a file: name the folder that holds it\.$"),
    ):
        with pytest.raises(ValueError, match=said):
            load_tokenizer(str(name))
