"""Atomic files and folders: written under a temporary name, synced to disk, then renamed.

A file or folder that is replaced leaves its permissions to the new one. A symbolic link is replaced as well, as
by Lightning: `last.ckpt` may be a link to a checkpoint that a save under that name must not change.

A killed process leaves a `.NAME.XXXX.memkit-partial` behind (a long NAME is shortened). Its writer held a lock,
which ended with the process, so the next save into that folder recognises that nobody writes it any more, and
removes it.
"""

import ctypes
import errno
import hashlib
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from lightning_memkit.checkpoints.writeback import StreamedFile
from lightning_memkit.memory.units import format_bytes
from lightning_memkit.utilities.atomic_write import fits, keep_mode, staged

try:
    import fcntl
except ImportError:  # Windows, where open files can't be removed; that serves as the lock
    fcntl = None

PARTIAL = ".memkit-partial"
PREVIOUS = ".memkit-previous"
_PREVIOUS_OF_LONG = ".memkit-previous-of-long"  # after a hash of a name that does not fit
CONTENTS = ".metadata"  # the file that identifies a torch.distributed.checkpoint folder
_MAKE_ROOM = "Free some, keep fewer checkpoints (ModelCheckpoint(save_top_k=...)), or give another dirpath."
_FULL = {  # by errno: the cause in words, and the remedy
    errno.ENOSPC: ("its file system is full", _MAKE_ROOM),
    errno.EDQUOT: ("the quota of its file system is used up", _MAKE_ROOM),
    errno.EFBIG: (
        "it is larger than a file may be there",
        "Raise the limit (`ulimit -f`), give a dirpath on another file system, or let ranks write shards "
        "(FSDP2Strategy).",
    ),
}
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextmanager
def new_file(target: Path) -> Iterator[BinaryIO]:
    """A file to write; it replaces ``target`` when the block ends, and is removed if the block raises."""
    _prepare(target)
    while True:
        partial = _partial(target)
        file = StreamedFile(partial, "xb")
        if _lock(file.fileno()):
            break
        file.close()
    with file:
        try:
            with saying_why_full(target):
                yield file
                os.fsync(file.fileno())
            put(partial, target)
        finally:
            remove(partial)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to fill; it replaces ``target`` when the block ends, and is removed if the block raises.

    Whoever writes files into it must sync them to disk.
    """
    _prepare(target)
    while True:
        partial = _partial(target)
        partial.mkdir()
        descriptor = _open_folder(partial)
        if descriptor is None or _lock(descriptor):
            break
        os.close(descriptor)
    try:
        with saying_why_full(target):
            yield partial
            sync_folder(partial)
        put(partial, target)
    finally:
        if descriptor is not None:
            os.close(descriptor)
        remove(partial)


@contextmanager
def saying_why_full(target: Path) -> Iterator[None]:
    """If a checkpoint can't be written for lack of space, raise an error that gives space and remedy."""
    try:
        yield
    except Exception as error:
        reason = why_full(error, target)
        if reason is None or isinstance(error, FullDiskError):
            raise
        raise FullDiskError(reason[0], reason[1]) from error


class FullDiskError(OSError):
    """A checkpoint was not written for lack of space; the previous one stays."""

    def __str__(self) -> str:
        return str(self.strerror)


def why_full(error: BaseException | None, target: Path) -> tuple[int, str] | None:
    """The errno and message of an error caused by a lack of space; None for other errors."""
    while (
        error is not None and getattr(error, "errno", None) not in _FULL
    ):  # torch's writer wraps the system's error
        error = error.__cause__ or error.__context__
    if error is None:
        return None
    number = int(getattr(error, "errno", errno.ENOSPC))
    what, remedy = _FULL[number]
    left = ""
    with suppress(OSError):
        space = shutil.disk_usage(target.parent)
        left = f"; {format_bytes(space.free)} of {format_bytes(space.total)} are free there"
    return number, (
        f"{target} could not be written: {what}{left}. No part of it is left, and an older checkpoint of that name "
        f"stays: there has to be room for both. {remedy}"
    )


def put(partial: Path, target: Path) -> None:
    """Rename ``partial`` to ``target`` whatever is there; at every moment one of them exists."""
    _keep_modes(target, partial)
    is_file = not _is_folder(partial) and not _is_folder(target)
    if is_file or not os.path.lexists(target):
        partial.replace(target)
    elif not _exchange(partial, target):
        # This file system can't exchange two names. If the process is killed between the two renames, the
        # previous checkpoint has another name, from which `recover` restores it.
        previous = _previous(target)
        remove(previous)
        target.replace(previous)
        partial.replace(target)
        remove(previous)
    sync_folder(target.parent)
    remove(partial)


def recover(target: Path) -> None:
    """Undo the first half of a replacement that was interrupted between its two renames."""
    previous = _previous(target)
    if not os.path.lexists(target) and previous.exists():
        with suppress(FileNotFoundError):  # another rank was faster
            previous.replace(target)


def remove(path: Path) -> None:
    """Remove a file or folder if it exists; a folder is renamed first, so that no half of it can be read."""
    if not _is_folder(path):
        path.unlink(missing_ok=True)
        return
    if not path.name.endswith((PARTIAL, PREVIOUS, _PREVIOUS_OF_LONG)):
        path = path.replace(_partial(path))
    while path.exists():
        with suppress(FileNotFoundError):  # another process removes it, too
            shutil.rmtree(path)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed saves have left in a folder, and complete interrupted renames."""
    for previous in folder.glob(f".*{PREVIOUS}"):
        target = previous.with_name(previous.name[1 : -len(PREVIOUS)])
        if os.path.lexists(target):
            remove(previous)
        else:
            recover(target)
    for partial in folder.glob(f".*{PARTIAL}"):
        try:
            _remove_if_abandoned(partial)
        except OSError as error:
            warnings.warn(
                f"{partial} is left over from a killed save and can't be removed: {error}.", stacklevel=3
            )


def sync_folder(folder: Path) -> None:
    """Sync a folder's entries to disk."""
    descriptor = _open_folder(folder)
    if descriptor is not None:
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (
                errno.EINVAL,
                errno.ENOTSUP,
            ):  # unsupported by some network file systems
                raise
        finally:
            os.close(descriptor)


def _prepare(target: Path) -> None:
    _refuse_other_folders(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(target.parent)
    # Of a long name, which can't be read from its leftover's.
    recover(target)
    remove(_previous(target))


def _refuse_other_folders(target: Path) -> None:
    """Refuse to replace a folder that is no checkpoint."""
    if _is_folder(target) and not (target / CONTENTS).is_file() and any(target.iterdir()):
        raise IsADirectoryError(
            f"{target} is a folder that holds other things than a checkpoint; give another path."
        )


def _partial(target: Path) -> Path:
    return staged(target, PARTIAL)


def _previous(target: Path) -> Path:
    """Where a target is put aside while another one takes its name."""
    name = f".{target.name}{PREVIOUS}"
    if not fits(name, target.parent):
        name = f".{hashlib.sha256(os.fsencode(target.name)).hexdigest()[:32]}{_PREVIOUS_OF_LONG}"
    return target.with_name(name)


def _keep_modes(target: Path, partial: Path) -> None:
    """Give the new one, and the files of a new folder, the permissions of those that they replace."""
    if _is_folder(target) == _is_folder(partial):
        keep_mode(target, partial)
        for file in partial.iterdir() if _is_folder(partial) else ():
            keep_mode(target / file.name, file)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _open_folder(folder: Path) -> int | None:
    return None if os.name == "nt" else os.open(folder, os.O_RDONLY)


def _lock(descriptor: int) -> bool:
    """Lock a file or folder until it is closed; False if another process has just removed it as abandoned."""
    if fcntl is None:
        return True
    with suppress(OSError):  # without locks on this file system, leftovers stay
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    return os.fstat(descriptor).st_nlink > 0


def _remove_if_abandoned(partial: Path) -> None:
    if fcntl is None:
        remove(partial)
        return
    try:
        descriptor = os.open(partial, os.O_RDONLY)
    except FileNotFoundError:
        return  # finished just now
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return  # its writer is alive
        remove(partial)
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names atomically; False if the system can't."""
    if not sys.platform.startswith("linux"):
        return False
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    return not renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
