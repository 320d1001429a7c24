"""Bytes as people write them: "22GiB", "512 MB", 1073741824."""

import re

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_PATTERN = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(size: int | str) -> int:
    """The bytes of a size such as ``"22GiB"`` (2**30), ``"24GB"`` (10**9) or a plain count.

    Raises:
        ValueError: the size is negative or zero, or can't be parsed.
    """
    rule = 'a size is a positive number of bytes or text such as "22GiB", "512MiB" or "24GB"'
    if isinstance(size, int):
        value = size
    else:
        match = _PATTERN.fullmatch(size) if isinstance(size, str) else None
        if match is None or match[2].lower() not in _UNITS:
            raise ValueError(f"{size!r} is not a size: {rule}.")
        value = int(float(match[1]) * _UNITS[match[2].lower()])
    if value <= 0:
        raise ValueError(f"{size!r} is not a size: {rule}.")
    return value


def format_bytes(count: float) -> str:
    """A byte count in the largest binary unit that keeps it at 1 or above: ``1536`` → ``"1.50 KiB"``."""
    sign, magnitude = ("-", -count) if count < 0 else ("", float(count))
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if magnitude >= size:
            return f"{sign}{magnitude / size:.{2 if magnitude < 100 * size else 1}f} {unit}"
    return f"{sign}{magnitude:.0f} B"
