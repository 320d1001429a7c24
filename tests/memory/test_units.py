from typing import Any

import pytest

from lightning_memkit.memory.units import format_bytes, parse_bytes, parse_fraction


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("22GiB", 22 * 2**30),
        ("24GB", 24 * 10**9),
        (" 512 mib ", 512 * 2**20),
        ("1.5KiB", 1536),
        ("24G", 24 * 10**9),
        ("24 gigabytes", 24 * 10**9),
        ("512 Mi", 512 * 2**20),
        ("1 gibibyte", 2**30),
        ("24 gigs", 24 * 10**9),
        ("24GBytes", 24 * 10**9),
        ("18GiBytes", 18 * 2**30),
        ("1,000 MB", 10**9),
        ("12,345,678", 12_345_678),
        ("24_000MiB", 24_000 * 2**20),
        ("24e9", 24 * 10**9),
        ("5. kb", 5000),
        (".5GiB", 2**29),
        (7, 7),
        ("9", 9),
    ],
)
def test_parses_sizes_as_people_write_them(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "-3GiB",
        "0",
        "22 GiBs",
        "much",
        "",
        -1,
        "1,5GiB",
        "1,50,000MB",
        "50%",
        "e9",
        "2__4",
        "1_",
        "1e999",
        None,
        1.5e9,
    ],
)
def test_refuses_what_is_no_size_and_shows_one(text: Any) -> None:
    with pytest.raises(ValueError, match="22GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0.9, 0.9), ("0.9", 0.9), (".5", 0.5), ("90%", 0.9), (" 12.5 % ", 0.125),
        ("90 percent", 0.9), ("90 Per cent", 0.9), ("100%", 1.0), ("1.0", 1.0),
        (1.5, None), ("150%", None), ("0%", None), ("1", 1.0), (1, None), ("24GiB", None), ("%", None), (None, None),
    ],
)  # fmt: skip
def test_fractions_as_people_write_them(share: Any, expected: float | None) -> None:
    assert parse_fraction(share) == expected


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (200 * 2**20, "200.0 MiB"), (-(2**30), "-1.00 GiB")],
)
def test_formats_in_the_largest_unit(count: int, expected: str) -> None:
    assert format_bytes(count) == expected
