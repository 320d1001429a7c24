"""Text in columns, and in lines that fit a terminal."""

import textwrap
from collections.abc import Container, Sequence

WIDTH = 120


def wrapped(text: str, indent: int = 0) -> list[str]:
    """A sentence in lines of at most 120 columns; those after the first are `indent` columns further to the right."""
    lines = textwrap.wrap(
        text,
        WIDTH,
        subsequent_indent=" " * (len(text) - len(text.lstrip()) + indent),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines or [text]


def aligned(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> str:
    """A line for each row, its cells below each other; those of the columns `right` end below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
