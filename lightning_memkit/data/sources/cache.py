"""Token stores kept in the user's cache folder: written whole or not at all, checked when read, then mapped."""

import contextlib
import hashlib
import json
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from lightning_memkit.data.sources.store import TokenStore, joined
from lightning_memkit.data.sources.token_file import FORMAT, UnwritableError, read_store, write_store
from lightning_memkit.utilities.cached_answers import cache_folder

try:
    import fcntl
except ImportError:  # Windows
    fcntl: Any = None


def cache_key(**depends_on: Any) -> str:
    """Sixteen digits that follow from all that a store depends on, and from the format of its file."""
    text = json.dumps({"format": FORMAT, **depends_on}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def cached(name: str, build: Callable[[], Iterable[TokenStore]], *, verify: bool = True) -> TokenStore:
    """The store kept under ``name``, mapped from its file; built if absent or broken.

    One process builds while the others wait. A file that is broken is reported and rebuilt. A folder that can't be
    written to is reported, and the store is kept in memory alone.

    Args:
        name: names all that the store depends on.
        build: gives the documents part by part, so that they need not fit in memory.
        verify: compares the file with its checksums, about a second a gigabyte; else only with its length.
    """
    path = cache_folder() / f"{name}.arrow"
    if (store := _read(path, verify)) is not None:
        return store
    try:
        with _alone(path):
            # Another process may have built it in the meantime; its file is no less checked.
            if (store := _read(path, verify, quiet=True)) is None:
                write_store(build(), path)
                store = read_store(path)
            return store
    except UnwritableError as error:
        warnings.warn(
            f"{error}, so its documents are kept in memory and built again next time; "
            "set XDG_CACHE_HOME to a folder that can.",
            stacklevel=2,
        )
        return joined(build())


def _read(path: Path, verify: bool, quiet: bool = False) -> TokenStore | None:
    if not path.exists():
        return None
    try:
        return read_store(path, verify=verify)
    except (OSError, KeyError, TypeError, ValueError) as error:
        if not quiet:
            warnings.warn(f"The cache {path} is broken ({error}); it is built again.", stacklevel=3)
        return None


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Waits until no other process of this machine builds the same file; where locks are unknown, builds beside it."""
    if fcntl is None:
        yield
        return
    lock = path.with_suffix(".lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("w")
    except OSError as error:
        raise UnwritableError(f"{path} can't be written ({error})") from error
    with file:
        with contextlib.suppress(OSError):  # a file system without locks
            # The process's own, unlike flock's: forks that tokenise and outlive it, killed, don't keep it.
            fcntl.lockf(file, fcntl.LOCK_EX)
        yield
    # The file stays: who waits on a lock of a name that was removed would hold another than the next to come.
