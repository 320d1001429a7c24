"""Halves of surrogate pairs in texts: JSON and Python's strings may hold them, UTF-8 and tokenizers may not."""

from collections.abc import Mapping
from typing import Any


def holds_half(value: Any) -> bool:
    """Whether a text, or one within messages, holds half of a surrogate pair."""
    if isinstance(value, str):
        if value.isascii():
            return False
        try:
            value.encode()
        except UnicodeEncodeError:
            return True
        return False
    if isinstance(value, Mapping):
        return any(holds_half(item) for pair in value.items() for item in pair)
    return isinstance(value, (list, tuple)) and any(map(holds_half, value))


def without_halves(value: Any) -> Any:
    """The same with a question mark for each half."""
    if isinstance(value, str):
        return value.encode("utf-8", errors="replace").decode()
    if isinstance(value, Mapping):
        return {without_halves(key): without_halves(item) for key, item in value.items()}
    return list(map(without_halves, value)) if isinstance(value, (list, tuple)) else value
