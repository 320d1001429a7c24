"""Token stores kept in the user's cache folder: written whole or not at all, checked when read."""

import os
import sys
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lightning_memkit.data.store import TokenStore


def cache_folder() -> Path:
    """Where caches live: ``lightning_memkit`` in ``$XDG_CACHE_HOME``, else in the platform's own place."""
    if named := os.environ.get("XDG_CACHE_HOME"):
        base = Path(named)
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    else:
        base = Path.home() / ".cache"
    return base / "lightning_memkit"


def cached(name: str, build: Callable[[], TokenStore]) -> TokenStore:
    """The store kept under ``name``, which must name all that it depends on; built if absent or broken.

    A file that can't be read is reported and rebuilt. A folder that can't be written to is reported, and the
    store is returned without being kept.
    """
    path = cache_folder() / f"{name}.npz"
    if path.exists():
        try:
            return _load(path)
        except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile, zlib.error) as error:
            warnings.warn(f"The cache {path} is broken ({error}); it is built again.", stacklevel=2)
    store = build()
    try:
        _save(store, path)
    except OSError as error:
        warnings.warn(
            f"{path} can't be written ({error}), so it is built again next time; "
            "set XDG_CACHE_HOME to a folder that can.",
            stacklevel=2,
        )
    return store


def _load(path: Path) -> TokenStore:
    # numpy reads through zipfile, which checks every array's CRC-32.
    # The file is opened here because numpy leaves it open where it is broken.
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        store = TokenStore(tokens=arrays["tokens"], offsets=arrays["offsets"])
    if store.offsets.ndim != 1 or store.tokens.ndim != 1 or int(store.offsets[-1]) != len(store.tokens):
        raise ValueError("its offsets don't fit its tokens")
    return store


def _save(store: TokenStore, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, tokens=store.tokens, offsets=store.offsets)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
