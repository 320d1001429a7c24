"""What building a model has imported in a fork, imported here once, so that the forks that follow have it."""

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Collection, Iterable
from importlib import import_module

# Building a model imports hundreds of their modules, which do nothing but define what they hold.
_LIBRARIES = ("transformers",)


def imported_since(before: Collection[str]) -> list[str]:
    """The modules of these libraries that were imported since `sys.modules` had these names."""
    return [name for name in sys.modules if name.partition(".")[0] in _LIBRARIES and name not in before]


def import_all(names: Iterable[str]) -> None:
    """Import modules without a word; those that can't be imported here are left out."""
    missing = [name for name in names if name not in sys.modules]
    if not missing:
        return
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in missing:
                with contextlib.suppress(Exception):
                    import_module(name)
    finally:
        logging.disable(level)
