"""Refuses options of another type in a sentence, with what to write: Python itself fails later, without their name."""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, TypeVar

import numpy as np

_AT_MOST_SHOWN = 60
_Options = TypeVar("_Options")


def refuse_no_number(name: str, value: Any, *, whole: bool = True, or_none: bool = False) -> None:
    """Raise for what is no number; ``whole`` ones are integers, of Python or numpy.

    Raises:
        ValueError: with the number to write, if the value is like one.
    """
    if (value is None and or_none) or _is_number(value, whole):
        return
    kind = "whole number" if whole else "number"
    rule = f"neither a {kind} nor None" if or_none else f"no {kind}"
    raise ValueError(f"{name}={shortened(value)} is {rule}; {_number_like(name, value, whole)}.")


def refuse_no_truth(name: str, value: Any) -> None:
    """Raise for what is neither True nor False: as a condition, the text "false" is true."""
    if not isinstance(value, (bool, np.bool_)):
        meant = str(value).strip().lower() in ("true", "yes", "on", "1")
        raise ValueError(f"{name}={shortened(value)} is neither True nor False; write {name}={meant}.")


def given_options(name: str, given: Any, kind: type[_Options]) -> _Options:
    """Options of a dataclass, which may be given as a mapping of its fields, as in YAML.

    Raises:
        ValueError: they are neither, or an option is unknown or out of range.
    """
    if isinstance(given, kind):
        return given
    known = [field.name for field in fields(kind)]  # pyright: ignore[reportArgumentType]
    if not isinstance(given, Mapping):
        raise ValueError(no_options(name, shortened(given), known))
    for option in given:
        if option not in known:
            close = get_close_matches(str(option), known, n=1)
            meant = f" (did you mean {close[0]!r}?)" if close else ""
            raise ValueError(f"{name} has no option {option!r}{meant}; it has {', '.join(known)}.")
    return kind(**given)


def no_options(name: str, given: str, known: Iterable[str]) -> str:
    """What is wrong with something, as a text, in the place of a mapping of these options."""
    known = list(known)
    return (
        f"{name}={given} is no mapping of options ({', '.join(known)}); write those that you want by name, "
        f"{name}={{{known[0]!r}: ...}}, in YAML {name}: {{{known[0]}: ...}}, or leave it out."
    )


def shortened(value: Any) -> str:
    """A value's repr on one line, cut off if it is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _AT_MOST_SHOWN else f"{text[:_AT_MOST_SHOWN]}..."


def _is_number(value: Any, whole: bool) -> bool:
    return isinstance(value, Integral if whole else Real) and not isinstance(value, (bool, np.bool_))


def _number_like(name: str, value: Any, whole: bool) -> str:
    """What to write instead."""
    try:
        number = None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = None
    if number is not None and whole:
        return f"write {name}={int(number)}" if number.is_integer() else "give one"
    return "give one" if number is None else f"write {name}={number:g}"
