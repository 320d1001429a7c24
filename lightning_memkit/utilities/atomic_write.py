"""Write a small text file atomically; checkpoints have their own writer (`checkpoints/atomic.py`)."""

import secrets
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically: readers see all of it or the old one, even if several processes write.

    Raises:
        OSError: the folder can't be written to; nothing is left in it.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
