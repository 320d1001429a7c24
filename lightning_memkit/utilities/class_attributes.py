"""The attributes of a class that are state, not code."""

import inspect
from typing import Any


def class_attributes(kind: type) -> dict[str, Any]:
    """A class's attributes except functions, descriptors and Python's own."""
    return {
        name: value
        for name, value in vars(kind).items()
        if not (name.startswith("__") and name.endswith("__"))
        and name not in ("_abc_impl", "_is_protocol")
        and not callable(value)
        and not inspect.isdatadescriptor(value)
        and not hasattr(type(value), "__get__")
    }


def restore_class_attributes(kind: type, before: dict[str, Any]) -> None:
    """Give a class exactly these attributes."""
    for name, value in class_attributes(kind).items():
        if name not in before:
            delattr(kind, name)
        elif value is not before[name]:
            setattr(kind, name, before[name])
    for name in before.keys() - vars(kind).keys():
        setattr(kind, name, before[name])
