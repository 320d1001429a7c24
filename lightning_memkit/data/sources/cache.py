"""Token stores in the user's cache folder: written whole or not at all, verified when read, then mapped."""

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
    """Sixteen hexadecimal digits that identify everything a store depends on, including the format of its file."""
    text = json.dumps({"format": FORMAT, **depends_on}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def cached(name: str, build: Callable[[], Iterable[TokenStore]], *, verify: bool = True) -> TokenStore:
    """The store cached under ``name``, mapped from its file; built if the file is absent or broken.

    One process builds while the others wait. A broken file is reported and rebuilt. If the folder can't be
    written to, this is reported, and the store is kept in memory only.

    Args:
        name: identifies everything that the store depends on.
        build: yields the documents part by part, so that they need not fit in memory.
        verify: compare the file with its checksums, about a second a gigabyte; otherwise only with its
            length.
    """
    path = cache_folder() / f"{name}.arrow"
    if (store := _read(path, verify)) is not None:
        return store
    try:
        with _alone(path):
            # Another process may have built it in the meantime; its file is verified as well.
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
    """Wait until no other process of this machine builds the same file; does not wait without file locks."""
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
            # `lockf` locks belong to the process, unlike `flock`'s: tokenizing forks that survive a killed
            # parent don't keep them.
            fcntl.lockf(file, fcntl.LOCK_EX)
        yield
    # The lock file stays: if it were removed, a waiting process would hold another lock than the next one to
    # come.
