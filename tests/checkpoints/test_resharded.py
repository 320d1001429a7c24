"""FSDP2 on 4 gloo ranks, resumed on 4, 2 and 1 bit for bit; damaged folders are refused, and nothing in one is run."""

import io
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch.distributed.checkpoint import FileSystemReader

from lightning_memkit.checkpoints.errors import CheckpointError
from lightning_memkit.checkpoints.sharded import REST, gather, load_rest, load_sharded, save_sharded
from lightning_memkit.optim.consolidated_files import consolidate_file, read_checkpoint
from tests.checkpoints.resharded import CASES, EPOCH, Losses, Rows
from tests.checkpoints.test_files import assert_same
from tests.plugins.several_ranks import Language
from tests.processes import run_on_ranks

RESUMED_ON = [4, 2, 1]


def launch(folder: Path, ranks: int, kind: str) -> Any:
    done = run_on_ranks("tests.checkpoints.resharded", str(folder), kind, ranks=ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / f"{kind}-{ranks}.found")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("ranks")
    return folder, launch(folder, 4, "save")


@pytest.mark.parametrize("ranks", [pytest.param(4, marks=pytest.mark.slow), 2, 1])
@pytest.mark.long
def test_what_four_ranks_saved_resumes_bitwise_on_any_number(ranks: int, saved: tuple[Path, Any]) -> None:
    folder, straight = saved
    resumed = launch(folder, ranks, "resume")
    for case in CASES:
        assert len(resumed[case]["losses"]) == EPOCH
        assert resumed[case]["losses"] == straight[case]["losses"][EPOCH:], case
        assert resumed[case]["losses"][0] != straight[case]["losses"][0]
        assert resumed[case]["states"]
        for what in ("weights", "states"):
            assert_same(straight[case][what], resumed[case][what], f"{case} {what}")
    left = {path.name for path in folder.iterdir() if path.suffix != ".found"}
    assert left == {f"{what}-{precision}.ckpt" for what, precision in CASES}


def test_a_folder_is_gathered_to_what_the_ranks_held(saved: tuple[Path, Any]) -> None:
    folder, found = saved
    for precision in ("32-true", "split"):
        whole = gather(folder / f"sharded-{precision}.ckpt")
        half = found["sharded", precision, "half"]
        for name, value in half["weights"].items():
            assert_same(value, whole["state_dict"][name], name)
        state = whole["optimizer_0"]["state"]["scale"]
        assert torch.equal(state["exp_avg"], half["states"]["scale/exp_avg"])
        assert whole["optimizer_0"]["param_groups"][0]["lr"] == pytest.approx(1e-2 * 0.9**EPOCH)
        only = gather(folder / f"sharded-{precision}.ckpt", lambda name: name == "state_dict")
        assert list(only) == ["state_dict"]


def test_a_consolidated_folder_is_the_file_that_the_ranks_would_have_gathered(
    saved: tuple[Path, Any], tmp_path: Path
) -> None:
    for precision in ("32-true", "split"):
        one = read_checkpoint(saved[0] / f"sharded-{precision}.ckpt")
        other = read_checkpoint(saved[0] / f"full-{precision}.ckpt")
        assert_same(dict(other["state_dict"]), dict(one["state_dict"]))
        for number, state in other["optimizer_states"][0]["state"].items():
            for name, value in state.items():
                assert_same(value, one["optimizer_states"][0]["state"][number][name], f"{number} {name}")
        consolidate_file(saved[0] / f"sharded-{precision}.ckpt", tmp_path / f"{precision}.ckpt")
        wide = torch.load(tmp_path / f"{precision}.ckpt", weights_only=True)
        assert {value.dtype for value in wide["state_dict"].values()} == {torch.float32}
    losses = Losses()
    trainer = Trainer(
        max_epochs=2, accelerator="cpu", devices=1, callbacks=[losses], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Language(), Rows(), ckpt_path=tmp_path / "32-true.ckpt")  # without memkit
    assert losses.losses == saved[1]["sharded", "32-true"]["losses"][EPOCH:]


def test_the_rest_of_a_folder_needs_no_code(saved: tuple[Path, Any]) -> None:
    rest = torch.load(saved[0] / "sharded-32-true.ckpt" / REST, weights_only=True)
    assert rest["global_step"] == EPOCH
    assert_same(rest, load_rest(saved[0] / "sharded-32-true.ckpt"))


STATE = {"state_dict": {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.ones(3)}, "lr": 0.1}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One process, without ranks."""
    save_sharded({**STATE}, {"epoch": 1}, tmp_path / "x.ckpt")
    return tmp_path / "x.ckpt"


def empty() -> dict[str, Any]:
    return {"state_dict": {"weight": torch.zeros(2, 3), "bias": torch.zeros(3)}, "lr": 0.0}


def test_one_process_saves_and_loads_a_folder(folder: Path) -> None:
    loaded = empty()
    load_sharded(loaded, folder)
    assert_same(STATE, loaded)
    assert_same(STATE, gather(folder))
    assert load_rest(folder) == {"epoch": 1}


class Harmful:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def refused(folder: Path, match: str, state: dict[str, Any] | None = None) -> None:
    loaded = empty() if state is None else state
    with pytest.raises(CheckpointError, match=match):
        load_sharded(loaded, folder)
    if state is None:
        with pytest.raises(CheckpointError, match=match):
            gather(folder)


def test_a_missing_shard_is_refused(folder: Path) -> None:
    (part,) = folder.glob("*.distcp")
    part.unlink()
    refused(folder, f"{part.name} is missing; nothing was loaded")


def test_a_shard_that_is_cut_off_is_refused(folder: Path) -> None:
    (part,) = folder.glob("*.distcp")
    part.write_bytes(part.read_bytes()[:-100])
    refused(folder, "is cut off: .* bytes")


def test_a_missing_table_of_contents_or_rest_is_refused(folder: Path) -> None:
    (folder / REST).unlink()
    with pytest.raises(CheckpointError, match="has no meta.pt"):
        load_rest(folder)
    (folder / ".metadata").unlink()
    refused(folder, "has no .metadata")


def test_a_table_of_contents_that_asks_for_code_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Harmful(tmp_path / "harm")))
    refused(folder, r"names \S+, which no table of contents needs .* nothing was run")
    assert not (tmp_path / "harm").exists()
    pickle.loads((folder / ".metadata").read_bytes())  # the trap works
    assert (tmp_path / "harm").exists()
    (folder / ".metadata").write_bytes(b"\x80\x04K")
    refused(folder, "is damaged")
    (folder / ".metadata").write_bytes(pickle.dumps(3))
    refused(folder, "is no table of contents")


def test_a_value_that_asks_for_code_is_refused(folder: Path, tmp_path: Path) -> None:
    """torch reads what is no tensor with all its code: the bytes of `lr` are exchanged for others."""
    save_sharded({**STATE}, {"epoch": 1}, folder, checksums=False)  # who means harm makes them fit, too
    metadata = FileSystemReader(folder).read_metadata()
    place = next(place for index, place in metadata.storage_data.items() if index.fqn == "lr")
    harm = io.BytesIO()
    torch.save(Harmful(tmp_path / "harm"), harm)
    (folder / "harm.distcp").write_bytes(harm.getvalue())
    place.relative_path, place.offset, place.length = "harm.distcp", 0, len(harm.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    refused(folder, "its lr is more than tensors and primitives and was not read")
    assert not (tmp_path / "harm").exists()
    place.relative_path = "../x.ckpt/harm.distcp"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    refused(folder, "outside the folder: it was refused")


def test_a_wrong_shape_and_a_missing_tensor_are_refused(folder: Path) -> None:
    state = empty()
    state["state_dict"]["weight"] = torch.zeros(3, 3)
    refused(folder, r"state_dict.weight has shape \(2, 3\) in it and \(3, 3\) here", state)
    state = empty()
    state["state_dict"]["other"] = torch.zeros(3)
    refused(folder, r"has no state_dict.other \(1 missing\)", state)


def test_what_is_not_data_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint\['hyper_parameters'\]\['path'\]"):
        save_sharded({}, {"hyper_parameters": {"path": tmp_path}}, tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError, match=r"checkpoint\['optimizer_0'\]\['function'\]"):
        save_sharded({"optimizer_0": {"function": print, "t": torch.ones(1)}}, {}, tmp_path / "x.ckpt")
    assert not list(tmp_path.iterdir())


def test_a_save_that_fails_leaves_the_old_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("torch.save", fail)
    with pytest.raises((OSError, CheckpointError), match="disk full"):
        save_sharded({"state_dict": {"weight": torch.zeros(1)}}, {}, folder)
    monkeypatch.undo()
    assert_same(STATE, gather(folder))
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    shutil.rmtree(folder)
