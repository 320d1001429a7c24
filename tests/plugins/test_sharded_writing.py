"""Folders that ranks write in threads: what stood there when asked, beside training's collectives, or an error."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memkit import StreamingCheckpointIO
from lightning_memkit.checkpoints import sharded
from lightning_memkit.checkpoints.background import host_copies
from lightning_memkit.checkpoints.errors import CheckpointError
from lightning_memkit.distributed import own_group
from lightning_memkit.plugins.strategies import _sharded_checkpoints
from tests.plugins import several_ranks
from tests.plugins.several_ranks import Language
from tests.processes import run_on_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    path = tmp_path_factory.mktemp("writing") / "found.pt"
    done = run_on_ranks("tests.plugins.two_ranks_writing", str(path))
    assert done.returncode == 0, done.stderr[-3000:]
    return path.parent / "kept", torch.load(path)


def test_ranks_train_on_while_their_threads_write_what_stood_there(ranks: Any) -> None:
    folder, (zero, one) = ranks
    for name, when in (("a", "weights"), ("b", "weights b")):
        saved = sharded.gather(folder / f"{name}.ckpt")["state_dict"]
        assert saved.keys() == zero[when].keys()
        for key, value in saved.items():
            assert torch.equal(value, zero[when][key]), key
            assert torch.equal(value, one[when][key]), key
    assert not torch.equal(zero["weights"]["scale"], zero["weights b"]["scale"])
    alone = several_ranks.trained("auto", "32-true", 1, 0)["losses"]
    assert zero["losses"] == pytest.approx(alone, abs=2e-5)


def test_nothing_is_removed_before_the_new_one_is_there(ranks: Any) -> None:
    for found in ranks[1]:
        assert found["before"] == ["before.ckpt", "other"]
        assert found["after"] == ["a.ckpt", "other"]


def test_collectives_of_threads_are_no_part_of_a_step(ranks: Any) -> None:
    """A step in which unknown collectives ran can't be repeated after it ran out of memory."""
    for found in ranks[1]:
        by_a_thread, by_training = found["counted"]
        assert by_a_thread == 0 < by_training


def test_what_one_rank_could_not_write_or_remove_is_said_on_all(ranks: Any) -> None:
    zero, one = (found["failures"] for found in ranks[1])
    assert zero[0].startswith("IsADirectoryError:")
    assert "Rank 0 could not write the checkpoint: IsADirectoryError" in one[0]
    assert zero[1] == "PermissionError: no"
    assert one[1] == "CheckpointError: Rank 0 could not write a checkpoint: PermissionError: no"
    assert ranks[1][0]["end"] == ["a.ckpt", "b.ckpt", "other"]  # what was to be removed after it stays


def test_one_process_writes_a_folder_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, plain = threading.Event(), sharded.save_sharded

    def held_back(*arguments: Any) -> None:
        assert go.wait(60)
        plain(*arguments)

    monkeypatch.setattr(sharded, "save_sharded", held_back)
    io, weight = StreamingCheckpointIO(asynchronous=True), torch.zeros(3)
    checkpoint = {"state_dict": {"w": weight, "tied": weight}, "loops": {"done": [1]}}
    loops = checkpoint["loops"]
    _sharded_checkpoints.save(checkpoint, tmp_path / "x.ckpt", io)
    weight += 1
    loops["done"].append(2)
    assert not list(tmp_path.iterdir())
    go.set()
    io.teardown()
    found = sharded.gather(tmp_path / "x.ckpt")["state_dict"]
    assert torch.equal(found["w"], torch.zeros(3))
    assert sharded.load_rest(tmp_path / "x.ckpt") == {"loops": {"done": [1]}}


def test_what_can_t_be_saved_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither|tensors and"):
        _sharded_checkpoints.save(
            {"state_dict": {}, "x": object()}, tmp_path / "x.ckpt", StreamingCheckpointIO(asynchronous=True)
        )


def test_copies_are_in_host_memory_and_tied_ones_once() -> None:
    module = Language()
    state = {"state_dict": module.state_dict(), "lr": 0.1, "empty": torch.empty(0)}
    copies = host_copies(state)
    weights = copies["state_dict"]
    assert weights["head.weight"] is weights["embedding.weight"]
    assert all(torch.equal(weights[name], value) for name, value in state["state_dict"].items())
    own = {value.data_ptr() for value in weights.values()}
    assert not own & {value.data_ptr() for value in state["state_dict"].values()}
    assert len(own) == len(list(module.parameters()))


def test_a_torch_without_gloo_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_group.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(own_group.distributed, "is_gloo_available", lambda: False)
    with pytest.raises(RuntimeError, match="asynchronous=False"):
        own_group.own_group()
