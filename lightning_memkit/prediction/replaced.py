"""Replace attributes temporarily."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Within the context, replace attributes of a module or class; names that it lacks are skipped."""
    before = {name: getattr(owner, name) for name in values if hasattr(owner, name)}
    for name in before:
        setattr(owner, name, values[name])
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
