"""The user's line behind an operator: the innermost stack frame outside of libraries."""

import sys
import sysconfig
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Literal

import torch

Place = tuple[str, int]

_OWN = str(Path(__file__).parents[1])
_FRAMEWORKS = (f"{_OWN}/", f"{Path(torch.__file__).parent}/")
_FRAMEWORK_NAMES = ("/lightning/", "/pytorch_lightning/", "/lightning_fabric/", "/torchmetrics/")
_INSTALLED = ("/site-packages/", "/dist-packages/")
_STANDARD = f"{sysconfig.get_paths()['stdlib']}/"
_TYPED_IN = ("<stdin>", "<string>", "<ipython")  # other names in <> are generated code


def place(outer: Collection[Place] = ()) -> Place | None:
    """File and line of the innermost frame of the user's code, else of a model library's, else None.

    Frames of torch, Lightning and memkit are skipped, so that the user can change the line. Costs a few
    microseconds if the stack is deep.

    Args:
        outer: the lines that `places` returned where training began; they only wait for training to end.
    """
    frame = sys._getframe(1)
    library: Place | None = None
    while frame is not None:
        name = frame.f_code.co_filename
        kind = _kind(name)
        if kind != "framework" and (found := (name, frame.f_lineno)) not in outer:
            if kind == "user":
                return found
            library = library or found
        frame = frame.f_back
    return library


def places() -> set[Place]:
    """All lines on the current stack."""
    frame, found = sys._getframe(1), set()
    while frame is not None:
        found.add((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return found


def describe(where: Place | None, otherwise: str) -> str:
    """`file:line`, with a path relative to the working directory if it is below that."""
    if where is None:
        return otherwise
    path, line = where
    try:
        path = str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        pass
    return f"{path}:{line}"


@cache
def _kind(name: str) -> Literal["framework", "library", "user"]:
    """Who wrote the code of a file."""
    if name.startswith("<"):
        return "user" if name.startswith(_TYPED_IN) else "framework"
    if name.startswith(_FRAMEWORKS):
        return "framework"
    if any(folder in name for folder in _INSTALLED):
        return "framework" if any(part in name for part in _FRAMEWORK_NAMES) else "library"
    return "framework" if name.startswith(_STANDARD) else "user"
