import os

import numpy as np
import pytest

from lightning_memkit.data.cache import cache_folder, cached
from lightning_memkit.data.store import TokenStore

STORE = TokenStore.of([[1, 2, 3], [], [4] * 500])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "lightning_memkit"


def never() -> TokenStore:
    pytest.fail("the cache was not used")


def test_a_store_is_built_once(folder):
    assert cached("a", lambda: STORE) is STORE
    again = cached("a", never)
    assert np.array_equal(again.tokens, STORE.tokens)
    assert np.array_equal(again.offsets, STORE.offsets)
    assert again.tokens.dtype == np.uint16


def half(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def flip_one_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def empty(path):
    path.write_bytes(b"")


def other_arrays(path):
    np.savez(path, something=np.zeros(3))


def offsets_of_another(path):
    np.savez(path, tokens=STORE.tokens, offsets=np.array([0, 3]))


@pytest.mark.parametrize("damage", [half, flip_one_bit, empty, other_arrays, offsets_of_another])
def test_a_broken_file_is_reported_and_built_again(folder, damage):
    cached("a", lambda: STORE)
    damage(folder / "a.npz")
    with pytest.warns(UserWarning, match="is broken .* built again"):
        assert np.array_equal(cached("a", lambda: STORE).tokens, STORE.tokens)
    assert np.array_equal(cached("a", never).tokens, STORE.tokens)


def test_a_write_that_fails_leaves_nothing_behind(folder, monkeypatch):
    def full_disk(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.warns(UserWarning, match="can't be written .*no space left.* XDG_CACHE_HOME"):
        assert cached("a", lambda: STORE) is STORE
    assert list(folder.iterdir()) == []


def test_a_build_that_fails_keeps_nothing(folder):
    def fails():
        raise RuntimeError("broken source")

    with pytest.raises(RuntimeError, match="broken source"):
        cached("a", fails)
    assert not folder.exists()


@pytest.mark.parametrize(("platform", "expected"), [("linux", ".cache"), ("darwin", "Library/Caches")])
def test_the_folder_is_the_platforms_own(monkeypatch, tmp_path, platform, expected):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", platform)
    assert cache_folder() == tmp_path / expected / "lightning_memkit"
