"""Text in columns."""

from lightning_memkit.utilities.columns import aligned


def test_columns_begin_or_end_below_each_other_without_spaces_at_ends_of_lines():
    rows = [("", "bytes", "why"), ("weights", "16", ""), ("total", "1,024", "all")]
    assert aligned(rows, right=(1,)).splitlines() == [
        "         bytes  why",
        "weights     16",
        "total    1,024  all",
    ]
