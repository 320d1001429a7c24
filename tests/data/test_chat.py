import json

import pytest

from lightning_memkit.data.sources.chat import conversation_of, learned_tokens, rendered
from lightning_memkit.data.sources.corpus import Corpus
from lightning_memkit.data.sources.shares import DocumentOptions
from lightning_memkit.data.sources.store import TokenStore

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}GEN{{ m['content'] }}<|end|>END"
    "{% else %}{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = TEMPLATE.replace("GEN", "{% generation %}").replace("END", "{% endgeneration %}")
PLAIN = TEMPLATE.replace("GEN", "").replace("END", "")
# Writes what was said before the last turn otherwise, as templates that drop earlier thoughts do.
REWRITING = PLAIN.replace("{{ m['content'] }}", "{{ m['content'] if loop.last else m['content'][:2] }}", 1)
# Writes a system's turn where the first is none, and so can't write the header of an answer alone.
FIRST = "{% if messages[0]['role'] != 'system' %}<|system|>be brief<|end|>{% endif %}" + PLAIN
STRICT = "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
ONE = [{"role": "user", "content": "what is it"}, {"role": "assistant", "content": "a small cat"}]
TWO = [{"role": "system", "content": "be brief"}, *ONE, {"role": "user", "content": "sure"}]
THREE = [*TWO, {"role": "assistant", "content": "yes it is"}]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Byte-level tokenizers trained here, with merges over spaces, that differ in their chat template."""
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["</s>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    model.train_from_iterator(["what is it", "a small cat", "yes it is", "be brief", "sure"] * 20, trainer)
    made = {}
    templates = {
        "marked": MARKED, "plain": PLAIN, "rewriting": REWRITING, "none": None, "first": FIRST,
        "strict": STRICT + PLAIN,
    }  # fmt: skip
    for name, template in templates.items():
        made[name] = str(tmp_path_factory.mktemp(name))
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>")
        fast.chat_template = template
        fast.save_pretrained(made[name])
    return made


def read(records, folder: str, **options) -> TokenStore:
    return Corpus(tokenizer_name=folder, options=DocumentOptions(**options)).read(records)


def learned(store: TokenStore) -> list[bool]:
    assert store.learned is not None
    return store.learned.tolist()


@pytest.mark.parametrize("messages", [ONE, TWO, THREE, [ONE[1], *ONE]])
@pytest.mark.parametrize("template", ["marked", "plain"])
def test_answers_are_learned_as_transformers_marks_them(folders, template, messages):
    oracle = transformers.AutoTokenizer.from_pretrained(folders["marked"]).apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    store = read([{"messages": messages}] * 2, folders[template])
    assert store.tokens.tolist() == oracle["input_ids"] * 2
    assert learned(store) == [bool(mask) for mask in oracle["assistant_masks"]] * 2
    assert 0 < sum(learned(store)) < len(store.tokens)


def test_other_chat_formats_are_read_as_the_messages_that_they_are(folders):
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    turns = [{"from": names[one["role"]], "value": one["content"]} for one in THREE]
    as_said, asked = (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "what is it\n\nsure"},
    )
    pairs = [
        ({"conversations": turns, "id": 3}, THREE),
        ({"conversations": turns[1:], "system": "be brief"}, THREE),
        ({"conversations": THREE}, THREE),
        ({"instruction": "what is it", "output": "a small cat"}, ONE),
        ({"instruction": "what is it", "input": " ", "output": "a small cat"}, ONE),
        ({"instruction": "what is it", "input": "sure", "output": "a small cat"}, [asked, ONE[1]]),
        ({"instruction": "what is it", "output": "a small cat", "system": "be brief"}, [as_said, *ONE]),
        (
            {"instruction": "sure", "output": "yes it is", "history": [["what is it", "a small cat"]]},
            [*ONE, *THREE[3:]],
        ),
        ({"conversations": turns, "system": "be brief"}, THREE),
    ]
    for record, messages in pairs:
        for kind in ("auto", "messages"):
            found = read([record], folders["plain"], kind=kind)
            wanted = read([{"messages": messages}], folders["plain"])
            assert found.tokens.tolist() == wanted.tokens.tolist()
            assert learned(found) == learned(wanted)


def test_a_text_stays_one_beside_another_format(folders):
    record = {"text": "sure", "instruction": "what is it", "output": "a small cat"}
    assert (
        read([record], folders["plain"]).tokens.tolist() == read(["sure"], folders["plain"]).tokens.tolist()
    )
    asked = read([record], folders["plain"], kind="messages")
    assert asked.tokens.tolist() == read([{"messages": ONE}], folders["plain"]).tokens.tolist()
    named = read([{"instruction": "sure", "output": "x"}], folders["plain"], text_field="instruction")
    assert named.tokens.tolist() == read(["sure"], folders["plain"]).tokens.tolist()


def test_a_turn_of_nobody_known_is_refused_with_its_document(folders):
    turns = [{"from": "narrator", "value": "once upon a time"}]
    with pytest.raises(
        ValueError, match=r"document 0: a turn is 'from' 'narrator', which is no known role \(system,"
    ):
        read([{"conversations": turns}], folders["plain"])
    other = {"instruction": "sure", "output": "yes it is", "history": ["what is it"]}
    with pytest.raises(ValueError, match="document 0: its 'history' is no list of pairs of texts"):
        read([other], folders["plain"])


@pytest.mark.parametrize("prompt", ["what is it", "what is it "])
def test_a_completion_is_learned_as_trl_learns_it(folders, prompt):
    pytest.importorskip("trl")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders["plain"])
    completion = " a small cat"
    ids = tokenizer(prompt + completion)["input_ids"] + [tokenizer.eos_token_id]
    asked = len(tokenizer(prompt)["input_ids"])
    store = read([{"prompt": prompt, "completion": completion}], folders["plain"])
    assert store.tokens.tolist() == ids
    expected = [number >= asked for number in range(len(ids))]
    if prompt.endswith(" "):  # where a token begins in the prompt, TRL counts tokens, and we its characters
        assert learned(store)[asked:] == expected[asked:]
    else:
        assert learned(store) == expected


def test_a_prompt_of_messages_ends_with_the_header_of_the_answer(folders):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders["plain"])
    whole = tokenizer.apply_chat_template(THREE, return_dict=True)["input_ids"]
    asked = tokenizer.apply_chat_template(TWO, return_dict=True, add_generation_prompt=True)["input_ids"]
    store = read([{"prompt": TWO, "completion": THREE[-1:]}], folders["plain"])
    assert store.tokens.tolist() == whole
    assert learned(store) == [number >= len(asked) for number in range(len(whole))]


def test_masking_can_be_left_out(folders):
    for record in ({"messages": THREE}, {"prompt": TWO, "completion": THREE[-1:]}):
        assert all(learned(read([record], folders["plain"], mask_prompt=False)))
    assert all(learned(read([{"prompt": "a", "completion": "b"}], "bytes", mask_prompt=False)))


def test_bytes_learn_a_completion_and_the_end():
    store = read([{"prompt": "größe", "completion": "é!"}], "bytes")
    assert store.tokens.tolist() == [256, *"größeé!".encode(), 257]
    assert learned(store) == [False] * 8 + [True] * 4


def test_texts_and_conversations_of_one_file_stay_in_order(folders, tmp_path):
    path = tmp_path / "a.jsonl"
    records = [{"text": "sure"}, {"messages": ONE}, {"text": "it is"}]
    path.write_text("\n".join(map(json.dumps, records)))
    store = read(path, folders["plain"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders["plain"])
    assert tokenizer.decode(store[0].tolist()) == "sure</s>"
    assert tokenizer.decode(store[1].tolist()).startswith("<|user|>what is it")
    assert learned(store)[: len(store[0])] == [True] * len(store[0])


@pytest.mark.parametrize(
    ("record", "template", "message"),
    [
        (
            {"messages": ONE[:1]},
            "plain",
            r"document 0: no message is of the role 'assistant' \(roles: \['user'\]\)",
        ),
        ({"messages": THREE}, "rewriting", r"the first 3 messages otherwise .*\{% generation %\}"),
        ({"messages": ONE}, "none", "has no chat template, which messages need"),
        ({"prompt": "a", "completion": ONE}, "plain", "'prompt' is str and 'completion' list"),
    ],
)
def test_what_can_not_be_masked_is_refused(folders, record, template, message):
    with pytest.raises(ValueError, match=message):
        read([record], folders[template])


@pytest.mark.parametrize(
    ("records", "template", "message"),
    [
        ([ONE, ["what", "is it"]], "plain", "document 1: a message is str; each is a mapping with role and"),
        ([ONE, THREE], "rewriting", "document 1: the chat template writes the first 3 messages otherwise"),
        (
            [ONE, [ONE[1]]],
            "first",
            "document 1: the chat template begins otherwise .* an answer stands first",
        ),
        (
            [ONE, [{"role": "tool", "content": ""}, ONE[1]]],
            "strict",
            "document 1: the chat template refuses .*no to",
        ),
    ],
)
def test_what_a_template_does_not_know_is_refused_with_the_document(folders, records, template, message):
    with pytest.raises(ValueError, match=message):
        read([{"messages": messages} for messages in records], folders[template])


def test_bytes_have_no_chat_template():
    with pytest.raises(
        ValueError, match='document 0: tokenizer="bytes" has no chat template.*or write a .prompt. and'
    ):
        read([{"messages": ONE}], "bytes")


@pytest.mark.parametrize(
    ("record", "fields"),
    [
        ({"instruction": "what is it", "output": "a small cat"}, r"'instruction' and 'output' \(Alpaca\)"),
        ({"conversations": ONE}, r"'conversations' \(ShareGPT\)"),
        ({"conversations": [{"from": "human", "value": "x"}]}, r"'conversations' \(ShareGPT\)"),
    ],
)
def test_an_error_about_messages_says_of_which_fields_they_were_made(record, fields):
    with pytest.raises(ValueError, match=f"^the source, document 1, read as messages for its {fields}: "):
        read([{"prompt": "a", "completion": "b"}, record], "bytes")


@pytest.mark.parametrize("history", [None, "of another form"])
def test_messages_of_its_own_are_read_as_nothing_else(history):
    record = {"messages": ONE, "instruction": "sure", "output": "yes", "history": history}
    with pytest.raises(ValueError, match="^the source, document 0: tokenizer"):
        read([record], "bytes")


def test_spans_are_of_the_text_and_hold_the_tokens_across_their_begin():
    def render(turns, header):
        return "".join(f"{turn['role'][0]}:{turn['content']};" for turn in turns) + "a:" * header

    text, spans = rendered(conversation_of({"messages": THREE}, "messages"), render)
    assert text == "s:be brief;u:what is it;a:a small cat;u:sure;a:yes it is;"
    assert [text[begin:end] for begin, end in spans] == ["a small cat;", "yes it is;"]
    assert learned_tokens([(0, 0), (0, 3), (2, 5), (5, 9), (9, 9)], [(4, 9)]) == [
        False,
        False,
        True,
        True,
        False,
    ]
