"""Names of files for libraries that take no name that is not UTF-8."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def readable_name(path: Path) -> Iterator[Path]:
    """The path, or another name of the same file that is UTF-8 and valid within the block.

    Only Linux and BSD have such names, and they have `/dev/fd`, too.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:
        with path.open("rb") as file:
            yield Path(f"/dev/fd/{file.fileno()}")
    else:
        yield path
