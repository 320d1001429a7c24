import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

from lightning_memkit.data.sources import token_file
from lightning_memkit.data.sources.cache import cache_key, cached
from lightning_memkit.data.sources.store import TokenStore
from lightning_memkit.data.sources.token_records import token_store
from lightning_memkit.utilities.cached_answers import cache_folder

STORE = token_store([[1, 2, 3], [], [4] * 500])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "lightning_memkit"


def never() -> list[TokenStore]:
    pytest.fail("the cache was not used")


def test_a_store_is_built_once(folder):
    assert np.array_equal(cached("a", lambda: [STORE]).tokens, STORE.tokens)
    again = cached("a", never)
    assert np.array_equal(again.tokens, STORE.tokens)
    assert np.array_equal(again.offsets, STORE.offsets)
    assert again.tokens.dtype == np.uint16


def half(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def flip_one_bit(path):
    content = bytearray(path.read_bytes())
    content[content.index(b"\1\0\2\0\3\0") + 2] ^= 1  # of the tokens
    path.write_bytes(bytes(content))


def empty(path):
    path.write_bytes(b"")


def another_file(path):
    with path.open("wb") as file:
        np.savez(file, something=np.zeros(3))


def another_header(path):
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"crcs": [', b'"crcs": [1', 1))


def of_another_format(path):
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"format": 2', b'"format": 3', 1))


def a_schema_alone(path):
    content = path.read_bytes()
    path.write_bytes(content[: content.index(b"\xff\xff\xff\xff", 8)])


DAMAGES = [half, flip_one_bit, empty, another_file, another_header, of_another_format, a_schema_alone]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_file_is_reported_and_built_again(folder, damage):
    cached("a", lambda: [STORE])
    damage(folder / "a.arrow")
    with pytest.warns(UserWarning, match="is broken .* built again"):
        assert np.array_equal(cached("a", lambda: [STORE]).tokens, STORE.tokens)
    assert np.array_equal(cached("a", never).tokens, STORE.tokens)


def test_a_write_that_fails_leaves_nothing_behind(folder, monkeypatch):
    def full_disk(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.warns(UserWarning, match="can't be written .*no space left.* XDG_CACHE_HOME"):
        assert np.array_equal(cached("a", lambda: [STORE]).tokens, STORE.tokens)
    assert [path.name for path in folder.iterdir()] == ["a.lock"]


def test_without_arrow_documents_are_kept_in_memory(folder, monkeypatch):
    monkeypatch.setattr(token_file, "find_spec", lambda name: None)
    with pytest.warns(UserWarning, match="pyarrow is not installed.*kept in memory"):
        assert np.array_equal(cached("a", lambda: [STORE]).tokens, STORE.tokens)


def test_a_build_that_fails_keeps_nothing(folder):
    def fails():
        raise RuntimeError("broken source")

    with pytest.raises(RuntimeError, match="broken source"):
        cached("a", fails)
    assert [path.name for path in folder.iterdir()] == ["a.lock"]


@pytest.mark.parametrize(("platform", "expected"), [("linux", ".cache"), ("darwin", "Library/Caches")])
def test_the_folder_is_the_platforms_own(monkeypatch, tmp_path, platform, expected):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", platform)
    assert cache_folder() == tmp_path / expected / "lightning_memkit"


def test_without_verification_a_file_need_only_be_whole(folder):
    cached("a", lambda: [STORE])
    flip_one_bit(folder / "a.arrow")
    assert cached("a", never, verify=False).documents == 3
    half(folder / "a.arrow")
    with pytest.warns(UserWarning, match="no whole Arrow file"):
        cached("a", lambda: [STORE], verify=False)


def test_parts_of_wider_tokens_and_masks_end_in_one_file(folder):
    parts = [
        token_store([[1, 2]]),
        token_store([{"input_ids": [70_000, 5], "labels": [-100, 5]}, [7]][:1]),
        token_store([[3]]),
    ]
    store = cached("a", lambda: parts)
    assert store.tokens.tolist() == [1, 2, 70_000, 5, 3]
    assert store.learned is not None
    assert store.learned.tolist() == [True, True, False, True, True]
    assert (store.vocabulary, store.tokens.dtype) == (70_001, np.int32)
    assert np.array_equal(cached("a", never).tokens, store.tokens)


UNPICKLED = """
import pickle, sys
store = pickle.load(sys.stdin.buffer)
assert store.documents == 1 and int(store.tokens.sum()) == sum(range(50_000))
assert "pyarrow" not in sys.modules
"""


def test_a_mapped_store_is_pickled_as_its_path_and_opened_without_arrow(folder):
    large = TokenStore(tokens=np.arange(50_000, dtype=np.uint16), offsets=np.array([0, 50_000]))
    store = cached("a", lambda: [large])
    pickled = pickle.dumps(store)
    assert len(pickled) < 1000
    assert np.array_equal(pickle.loads(pickled).tokens, large.tokens)
    subprocess.run([sys.executable, "-c", UNPICKLED], input=pickled, check=True, timeout=120)


def test_its_checksum_is_that_of_the_documents_in_memory(folder):
    masked = [{"input_ids": [70_000, 5], "labels": [-100, 5]}, {"input_ids": [1], "labels": [1]}]
    for name, documents in (("plain", [[1, 2], [], [3]]), ("masked", masked)):
        store = token_store(documents)
        mapped = cached(name, lambda store=store: [store])
        assert mapped.checksum == store.checksum
        assert mapped.vocabulary == store.vocabulary


def test_datasets_reads_the_file_too(folder):
    datasets = pytest.importorskip("datasets")
    cached("a", lambda: [token_store([{"input_ids": [7, 8], "labels": [-100, 8]}])])
    table = datasets.Dataset.from_file(str(folder / "a.arrow"))
    assert table[:] == {"input_ids": [[7, 8]], "learned": [[0, 1]]}


def test_what_was_touched_is_given_back_and_read_again(folder, monkeypatch):
    store = cached("a", lambda: [STORE])
    given_back = []
    monkeypatch.setattr(token_file, "_HELD", 1)
    monkeypatch.setattr(token_file.MappedStore, "give_back", lambda self: given_back.append(1))
    assert store.read(np.array([0, 2]), np.array([1, 1]))[0].tolist() == [1, 3]
    assert given_back == [1]
    monkeypatch.undo()
    assert isinstance(store, token_file.MappedStore)
    store.give_back()
    assert store.read(np.array([0, 2]), np.array([1, 1]))[0].tolist() == [1, 3]


def test_what_a_killed_process_left_goes_after_a_day(folder):
    path = folder / "kept.arrow"
    stale, fresh = folder / "keptabc.part", folder / "keptdef.part"
    for part in (stale, fresh):
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(b"half")
    os.utime(stale, (0, 0))
    token_file.write_store([STORE], path)
    assert {file.name for file in folder.iterdir()} == {"kept.arrow", "keptdef.part"}


BUILDER = """
import sys, time
import numpy as np
from lightning_memkit.data.sources.cache import cached
from lightning_memkit.data.sources.token_records import token_store

def build():
    print("built", flush=True)
    time.sleep(0.3)
    return [token_store([[1, 2, 3]])]

assert cached("a", build).tokens.tolist() == [1, 2, 3]
"""


@pytest.mark.long
def test_of_several_processes_one_builds(folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([sys.executable, "-c", BUILDER], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    printed = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sum(text.count("built") for text in printed) == 1


def test_a_key_follows_from_everything_it_is_given():
    keys = {cache_key(source="a", tokenizer="b"), cache_key(source="a", tokenizer="c"), cache_key(source="b")}
    assert len(keys) == 3
    assert cache_key(source="a") == cache_key(source="a")


def test_two_that_build_at_once_do_not_take_each_others_parts(folder):
    """Without the lock of the name, as on a file system that has none: the second begins and ends amid the first."""
    path = folder / "kept.arrow"

    def slowly():
        yield STORE
        token_file.write_store([STORE], path)
        yield STORE

    token_file.write_store(slowly(), path)
    assert token_file.read_store(path, verify=True).documents == 2 * STORE.documents
    assert {file.name for file in folder.iterdir()} == {"kept.arrow"}


KILLED = """
import os, signal, sys
from pathlib import Path
from lightning_memkit.data.sources import tokenising
from lightning_memkit.data.sources.corpus import Corpus
from lightning_memkit.data.sources.shares import DocumentOptions

tokenising._ALONE_SECONDS = 0.0
if sys.argv[2] == "kill":
    encoded, count = tokenising._by_processes, [0]

    def killed(*given):
        for number, part in enumerate(encoded(*given)):
            if number == 3:
                os.kill(os.getpid(), signal.SIGKILL)  # its processes live on
            yield part

    tokenising._by_processes = killed
store = Corpus(tokenizer_name="bytes", options=DocumentOptions(processes=2)).read(sys.argv[1])
print(store.documents)
"""


@pytest.mark.long
def test_a_process_that_is_killed_amid_a_build_leaves_nothing_that_counts_and_no_lock(folder, tmp_path):
    source = tmp_path / "texts.jsonl"
    source.write_text("\n".join(f'{{"text": "{"x" * 1000}"}}' for _ in range(6000)))
    command = [sys.executable, "-c", KILLED, str(source)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    killed = subprocess.run([*command, "kill"], env=environment, stdout=subprocess.DEVNULL, timeout=60)
    assert killed.returncode == -9
    assert [path.suffix for path in folder.iterdir()] == [".lock"]
    # Those that it had started may still wait for work; whoever builds next waits for none of them.
    again = subprocess.run([*command, "build"], env=environment, capture_output=True, text=True, timeout=60)
    assert again.stdout.strip() == "6000", again.stderr
    assert sorted(path.suffix for path in folder.iterdir()) == [".arrow", ".lock"]
