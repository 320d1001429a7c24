"""Write a small text file whole or not at all; checkpoints have a writer of their own (`checkpoints/atomic.py`)."""

import secrets
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a text file; whoever reads sees all of it or what was there before, also if several write.

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
