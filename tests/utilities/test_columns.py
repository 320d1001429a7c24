"""Text in columns."""

from lightning_memkit.utilities.columns import WIDTH, aligned, wrapped


def test_columns_begin_or_end_below_each_other_without_spaces_at_ends_of_lines():
    rows = [("", "bytes", "why"), ("weights", "16", ""), ("total", "1,024", "all")]
    assert aligned(rows, right=(1,)).splitlines() == [
        "         bytes  why",
        "weights     16",
        "total    1,024  all",
    ]


def test_sentences_are_wrapped_and_keep_their_words() -> None:
    sentence = "  " + " ".join(f"word-{number}" for number in range(60))
    lines = wrapped(sentence, indent=2)
    assert len(lines) > 2
    assert all(len(line) <= WIDTH for line in lines)
    assert " ".join(line.strip() for line in lines) == sentence.strip()
    assert [len(line) - len(line.lstrip()) for line in lines] == [2, *[4] * (len(lines) - 1)]
    assert wrapped("short") == ["short"]
    assert wrapped("x" * 200) == ["x" * 200]
