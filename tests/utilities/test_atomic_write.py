"""A text file is written whole or not at all."""

from pathlib import Path

import pytest

from lightning_memkit.utilities.atomic_write import write_whole


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
