"""Staged names, and text files written atomically; checkpoints have their own writer (`checkpoints/atomic.py`)."""

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

_LONGEST_NAME = 255  # bytes, on nearly every file system


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically: readers see all of it or the old one, even if several processes write.

    A file that is replaced leaves its permissions to the new one.

    Raises:
        OSError: the folder can't be written to; nothing is left in it.
    """
    part = staged(path, ".part")
    try:
        part.write_text(text, encoding="utf-8")
        keep_mode(path, part)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def staged(target: Path, suffix: str) -> Path:
    """A new hidden name beside ``target``: `.NAME.XXXXXXXX` and a suffix; a long NAME is shortened to fit."""
    ending = f".{secrets.token_hex(4)}{suffix}"
    return target.with_name(f".{_shortened(target, ending)}{ending}")


def fits(name: str, folder: Path) -> bool:
    """Whether a folder's file system takes a name of this length."""
    return len(os.fsencode(name)) <= _longest_name(folder)


def _shortened(target: Path, ending: str) -> str:
    room = _longest_name(target.parent) - 1 - len(ending)
    whole = os.fsencode(target.name)
    # What is cut must not end within a character.
    return target.name if len(whole) <= room else whole[:room].decode("utf-8", errors="ignore")


def keep_mode(replaced: Path, new: Path) -> None:
    """Give ``new`` the permissions and the group of the file or folder that it is about to replace, if any.

    A symbolic link has none of its own.
    """
    try:
        old = replaced.lstat()
    except OSError:
        return
    if stat.S_ISLNK(old.st_mode):
        return
    with suppress(OSError, AttributeError):  # a group of which this user is no member; Windows has none
        if new.stat().st_gid != old.st_gid:
            os.chown(new, -1, old.st_gid)
    with suppress(OSError):  # file systems without permissions
        new.chmod(stat.S_IMODE(old.st_mode) & 0o777)


def _longest_name(folder: Path) -> int:
    try:
        return os.pathconf(folder, "PC_NAME_MAX")
    except (OSError, ValueError, AttributeError):  # not there yet, or Windows
        return _LONGEST_NAME
