"""A text file is written whole or not at all."""

import sys
from pathlib import Path

import pytest

from lightning_memkit.utilities.atomic_write import staged, write_whole


def test_what_was_there_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    for text in ("one", "two ü"):
        write_whole(tmp_path / "page.html", text)
        assert (tmp_path / "page.html").read_text(encoding="utf-8") == text
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole(tmp_path / "page.html", "one")

    def full(self: Path, target: Path) -> None:
        raise OSError("full")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="full"):
        write_whole(tmp_path / "page.html", "two")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["one"]


def test_the_file_may_be_read_by_whom_the_umask_lets(tmp_path: Path) -> None:
    write_whole(tmp_path / "ours", "")
    (tmp_path / "plain").write_text("")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.skipif(sys.platform == "win32", reason="no such permissions")
def test_a_file_that_is_replaced_leaves_its_permissions(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    for mode in (0o664, 0o600):
        write_whole(page, "one")
        page.chmod(mode)
        write_whole(page, "two")
        assert page.stat().st_mode & 0o777 == mode


@pytest.mark.skipif(sys.platform == "win32", reason="names are limited otherwise")
@pytest.mark.parametrize("name", ["x" * 255, "ü" * 127, "\U0001f600" * 63, "a" + "\U0001f600" * 63])
def test_a_name_may_be_as_long_as_the_file_system_takes(name: str, tmp_path: Path) -> None:
    for text in ("one", "two"):
        write_whole(tmp_path / name, text)
    assert [file.name for file in tmp_path.iterdir()] == [name]
    part = staged(tmp_path / name, ".part")
    part.touch()
    assert part.name.startswith("." + name[:50])
    assert part.name.endswith(".part")
    assert part.name != staged(tmp_path / name, ".part").name
