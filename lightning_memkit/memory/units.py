"""Bytes as people write them: "22GiB", "1,000 MB", "24 gigs", 1073741824; and fractions: 0.9, "90%", "90 percent"."""

import re

_PREFIXES = (("k", "kilo", "kibi"), ("m", "mega", "mebi"), ("g", "giga", "gibi"), ("t", "tera", "tebi"))
_SHORT = {"meg": 1000**2, "megs": 1000**2, "gig": 1000**3, "gigs": 1000**3}  # as in a shop: decimal
_UNITS: dict[str, int] = {"": 1, "b": 1, "byte": 1, "bytes": 1, **_SHORT}
for _power, (_letter, _decimal, _binary) in enumerate(_PREFIXES, 1):
    for _name in (
        _letter,
        *(f"{_short}{_byte}" for _short in (_letter, _decimal) for _byte in ("b", "byte", "bytes")),
    ):
        _UNITS[_name] = int(1000**_power)
    for _name in (
        f"{_letter}i",
        *(f"{_short}{_byte}" for _short in (f"{_letter}i", _binary) for _byte in ("b", "byte", "bytes")),
    ):
        _UNITS[_name] = 1 << 10 * _power
_SIZE = re.compile(
    r"\s*([0-9]{1,3}(?:,[0-9]{3})+|[0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?(?:e\+?[0-9]{1,2})?|\.[0-9]+)\s*([a-z]*)\s*",
    re.IGNORECASE,
)
_SHARE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*(%|percent|per cent|pct|)\s*", re.IGNORECASE)


def parse_bytes(size: int | str) -> int:
    """The bytes of a size such as ``"22GiB"`` (2**30), ``"24GB"``, ``"24G"`` (10**9) or a plain count.

    Raises:
        ValueError: the size is negative or zero, or can't be parsed.
    """
    rule = 'a size is a positive number of bytes or text such as "22GiB", "512MiB" or "24GB"'
    if isinstance(size, int):
        value = size
    else:
        match = _SIZE.fullmatch(size) if isinstance(size, str) else None
        if match is None or match[2].lower() not in _UNITS:
            raise ValueError(f"{size!r} is not a size: {rule}.")
        value = int(float(match[1].replace(",", "")) * _UNITS[match[2].lower()])
    if value <= 0:
        raise ValueError(f"{size!r} is not a size: {rule}.")
    return value


def parse_fraction(share: object) -> float | None:
    """The fraction in (0, 1] that ``0.9``, ``"0.9"``, ``"90%"`` or ``"1"`` is; None for anything else.

    The integer 1 is a count of bytes.
    """
    if isinstance(share, str):
        match = _SHARE.fullmatch(share)
        if match is None or not (match[2] or "." in match[1] or match[1] == "1"):
            return None
        share = float(match[1]) / (100 if match[2] else 1)
    return share if isinstance(share, float) and 0 < share <= 1 else None


def is_auto(size: object) -> bool:
    """Whether a size is `"auto"`, in letters of any case."""
    return isinstance(size, str) and size.strip().lower() == "auto"


def format_bytes(count: float) -> str:
    """A byte count in the largest binary unit that keeps it at 1 or above: ``1536`` → ``"1.50 KiB"``."""
    sign, magnitude = ("-", -count) if count < 0 else ("", float(count))
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if magnitude >= size:
            return f"{sign}{magnitude / size:.{2 if magnitude < 100 * size else 1}f} {unit}"
    return f"{sign}{magnitude:.0f} B"
