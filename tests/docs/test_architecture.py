"""The page on the architecture names files that exist."""

import re
from pathlib import Path

import pytest

import lightning_memkit

PACKAGE = Path(lightning_memkit.__file__).parent
PAGE = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`([\w/]+/[\w*]*\.(?:py|cpp))`", PAGE)))


def exists(path: str) -> bool:
    """Whether a file, or one of a pattern, is in the package or beside it."""
    return any(any(folder.glob(path)) for folder in (PACKAGE, PACKAGE.parent))


@pytest.mark.parametrize("path", NAMED)
def test_a_file_that_the_page_names_exists(path: str) -> None:
    assert exists(path)


def test_files_are_named_and_one_that_is_gone_is_noticed() -> None:
    assert len(NAMED) > 20
    assert not exists("plugins/_seam.py")
