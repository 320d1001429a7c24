# pyright: reportAttributeAccessIssue=false, reportArgumentType=false
"""Every source gives the same values, at the module's dtype; what is not whole or doesn't fit changes nothing."""

import json
import pickle
import random
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from lightning_memkit.checkpoints.checksums import CHUNK_BYTES
from lightning_memkit.checkpoints.files import save
from lightning_memkit.checkpoints.sharded import save_sharded
from lightning_memkit.initialization import load_weights
from lightning_memkit.initialization.building import build_empty, build_on
from lightning_memkit.initialization.weight_files import open_file
from lightning_memkit.initialization.weight_source import PIECE_BYTES
from lightning_memkit.utilities.errors import WeightsError
from tests.spoiled import spoiled


class Net(nn.Module):
    """Ties, persistent and other buffers, integers, a scalar."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.table.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("positions", torch.arange(0.0, 300.0), persistent=False)


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    values = {
        name: torch.rand_like(v) if v.is_floating_point() else v + 7 for name, v in Net().state_dict().items()
    }
    return {name: value.clone() for name, value in values.items() if name != "head.weight"}


def safetensors_file(folder: Path) -> Path:
    save_file(weights(), folder / "weights.safetensors")
    return folder / "weights.safetensors"


def safetensors_folder(folder: Path) -> Path:
    parts: dict[str, dict[str, torch.Tensor]] = {"a.safetensors": {}, "b.safetensors": {}}
    places = {}
    for number, (name, value) in enumerate(weights().items()):
        places[name] = sorted(parts)[number % 2]
        parts[places[name]][name] = value
    for name, part in parts.items():
        save_file(part, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def torch_file(folder: Path) -> Path:
    torch.save(weights(), folder / "weights.pt")
    return folder / "weights.pt"


def lightning_file(folder: Path) -> Path:
    torch.save({"state_dict": weights(), "epoch": 3, "optimizer_states": [{}]}, folder / "last.ckpt")
    return folder / "last.ckpt"


def dcp_folder(folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(weights(), checkpoint_id=folder, no_dist=True)
    return folder


def lightning_folder(folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        content = {"state_dict": weights(), "optimizer_0": {"exp_avg": torch.ones(3)}, "epoch": 3}
        dcp.save(content, checkpoint_id=folder, no_dist=True)
    return folder


def memkit_file(folder: Path) -> Path:
    tied = weights()
    tied["head.weight"] = tied["table.weight"]
    save(
        {"state_dict": tied, "optimizer_states": [{"exp_avg": torch.ones(3)}], "epoch": 3},
        folder / "last.ckpt",
    )
    return folder / "last.ckpt"


def memkit_folder(folder: Path) -> Path:
    save_sharded(
        {"state_dict": weights(), "optimizer_0": {"exp_avg": torch.ones(3)}}, {"epoch": 3}, folder / "x"
    )
    return folder / "x"


SOURCES = [
    safetensors_file, safetensors_folder, torch_file, lightning_file, memkit_file, dcp_folder, lightning_folder,
    memkit_folder,
]  # fmt: skip


def assert_loaded(net: nn.Module, dtype: torch.dtype) -> None:
    assert net.head.weight is net.table.weight
    for name, value in weights().items():
        own = net.get_parameter(name) if name in dict(net.named_parameters()) else net.get_buffer(name)
        kept = name.startswith("norm") or not value.is_floating_point()
        assert torch.equal(own, value if kept else value.to(dtype)), name
    assert torch.equal(net.positions, torch.arange(0.0, 300.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", SOURCES)
def test_values_are_those_of_a_cast_and_objects_stay(make, dtype, tmp_path):
    with build_on("cpu", dtype):
        net = Net()
    before = list(map(id, net.parameters()))
    loaded = load_weights(net, make(tmp_path))
    assert_loaded(net, dtype)
    assert before == list(map(id, net.parameters()))
    assert not loaded.missing
    assert not loaded.unexpected
    assert set(loaded.loaded) == weights().keys()


@pytest.mark.parametrize("make", SOURCES)
def test_parameters_without_memory_get_it(make, tmp_path):
    with build_empty("cpu", torch.bfloat16):
        net = Net()
    assert all(parameter.is_meta for parameter in net.parameters())
    parameter = net.table.weight
    load_weights(net, make(tmp_path), device="cpu")
    assert net.table.weight is parameter
    assert_loaded(net, torch.bfloat16)


def test_a_device_is_asked_for_before_anything_is_written(tmp_path):
    with build_empty("cpu"):
        net = Net()
    with pytest.raises(WeightsError, match=r"4 tensors .* meta device .* device="):
        load_weights(net, safetensors_file(tmp_path))
    assert all(parameter.is_meta for parameter in net.parameters())


def test_a_context_of_initialisers_does_not_write_over_what_was_loaded(tmp_path):
    with build_on("cpu", torch.bfloat16):
        net = Net()
        alias = net.table.weight.data
        alias.fill_(3)
        load_weights(net, safetensors_file(tmp_path))
        alias.fill_(4)
    assert_loaded(net, torch.bfloat16)


def test_large_tensors_are_copied_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_memkit.initialization.weight_source.PIECE_BYTES", 64)
    assert PIECE_BYTES > 64
    for make in (safetensors_file, torch_file):
        with build_on("cpu", torch.bfloat16):
            net = Net()
        load_weights(net, make(tmp_path))
        assert_loaded(net, torch.bfloat16)


def test_names_are_renamed_by_their_beginnings(tmp_path):
    save_file({"old.weight": torch.ones(2, 2), "old.extra.bias": torch.zeros(2)}, tmp_path / "w.safetensors")
    net = nn.Sequential(nn.Linear(2, 2, bias=False))
    result = load_weights(net, tmp_path / "w.safetensors", rename={"old.": "0.", "old.extra.": None})
    assert result.loaded == ["0.weight"]
    assert torch.equal(net[0].weight, torch.ones(2, 2))
    with pytest.raises(WeightsError, match="rename makes x of old"):
        load_weights(net, tmp_path / "w.safetensors", rename={"old.weight": "x", "old.extra.bias": "x"})


def test_what_differs_is_named_with_both_shapes_and_nothing_is_written(tmp_path):
    file = tmp_path / "w.safetensors"
    save_file({"weight": torch.ones(3, 2), "odd": torch.ones(1)}, file)
    net = nn.Linear(2, 2)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    for strict in (True, False):
        with pytest.raises(WeightsError) as error:
            load_weights(net, file, strict=strict)
        assert "weight: stored (3, 2), in the module (2, 2)" in str(error.value)
        assert ("Missing in the source (1): bias" in str(error.value)) == strict
        assert ("Unexpected, not in the module (1): odd" in str(error.value)) == strict
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_not_strict_loads_what_is_in_both(tmp_path):
    save_file({"weight": torch.ones(2, 2), "odd": torch.ones(1)}, tmp_path / "w.safetensors")
    net = nn.Linear(2, 2)
    result = load_weights(net, tmp_path / "w.safetensors", strict=False)
    assert (result.loaded, result.missing, result.unexpected) == (["weight"], ["bias"], ["odd"])
    save_file({"other": torch.ones(2, 2)}, tmp_path / "w.safetensors")
    with pytest.raises(WeightsError, match="No name of the source is one of the module's"):
        load_weights(net, tmp_path / "w.safetensors", strict=False)


def test_a_table_that_older_files_hold_is_left_as_it_is(tmp_path):
    save_file({**weights(), "positions": torch.zeros(5)}, tmp_path / "w.safetensors")
    net = Net()
    load_weights(net, tmp_path / "w.safetensors")
    assert_loaded(net, torch.float32)


def both_names(other: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**weights(), "head.weight": other}


@pytest.mark.parametrize(
    ("write", "ending"),
    [
        (save_file, ".safetensors"),
        (torch.save, ".pt"),
        (lambda state, path: dcp.save(state, checkpoint_id=path), ""),
    ],
)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_names_of_one_tensor_with_other_values_are_refused(write, ending, tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_memkit.initialization.weight_source.PIECE_BYTES", 64)
    table = weights()["table.weight"]
    table[3, 3] = float("nan")
    write({**both_names(table.clone()), "table.weight": table}, tmp_path / f"same{ending}")
    net = Net()
    assert load_weights(net, tmp_path / f"same{ending}").unexpected == []
    assert torch.equal(net.head.weight[:3], table[:3])
    table = weights()["table.weight"]
    last = table.clone()
    last[-1, -1] += 1e-3
    write(both_names(last), tmp_path / f"other{ending}")
    before = {name: value.clone() for name, value in net.state_dict().items()}
    for strict in (True, False):
        with pytest.raises(
            WeightsError, match=r"table.weight is one tensor .* as head.weight than as table.weight;"
        ):
            load_weights(net, tmp_path / f"other{ending}", strict=strict)
    for name, value in net.state_dict().items():
        assert torch.equal(value.nan_to_num(), before[name].nan_to_num()), name
    load_weights(net, tmp_path / f"other{ending}", rename={"head.weight": None})
    assert torch.equal(net.head.weight, table)
    load_weights(net, tmp_path / f"other{ending}", rename={"table.weight": None})
    assert torch.equal(net.head.weight, last)
    with build_on("cpu", torch.bfloat16):
        rounded = Net()
    last[-1, -1] = table[-1, -1].bfloat16()  # the same in the dtype that is trained
    write(both_names(last), tmp_path / f"rounded{ending}")
    load_weights(rounded, tmp_path / f"rounded{ending}")
    assert torch.equal(rounded.head.weight, table.bfloat16())


def test_a_name_of_one_tensor_with_another_shape_is_refused(tmp_path):
    save_file(both_names(torch.ones(3, 2)), tmp_path / "w.safetensors")
    with pytest.raises(WeightsError, match=r"stored \(3, 2\), in the module \(11, 6\)"):
        load_weights(Net(), tmp_path / "w.safetensors")


def test_other_kinds_of_numbers_are_refused(tmp_path):
    save_file(
        {"weight": torch.ones(2, 2, dtype=torch.int32), "bias": torch.ones(2)}, tmp_path / "w.safetensors"
    )
    with pytest.raises(WeightsError, match=r"weight: stored torch.int32, in the module torch.float32"):
        load_weights(nn.Linear(2, 2), tmp_path / "w.safetensors")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


@pytest.mark.parametrize("make", SOURCES)
def test_a_file_cut_short_changes_nothing(make, tmp_path):
    path = make(tmp_path)
    files = [path] if path.is_file() else [*path.glob("b.safetensors"), *path.glob("*.distcp")]
    cut(files[0])
    net = Net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(WeightsError, match="nothing was loaded"):
        load_weights(net, path)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("make", [memkit_file, memkit_folder])
def test_flipped_bytes_of_what_has_checksums_change_nothing(make, tmp_path):
    path, dice, net = make(tmp_path), random.Random(0), Net()
    files = [path] if path.is_file() else sorted(path.glob("*.distcp"))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    for number in range(60):
        file = files[number % len(files)]
        content = file.read_bytes()
        flipped = bytearray(content)
        flipped[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        file.write_bytes(flipped)
        try:
            load_weights(net, path)
        except WeightsError:
            assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
        else:  # in what is no weight
            assert_loaded(net, torch.float32)
            net.load_state_dict(before)
        file.write_bytes(content)
    load_weights(net, path)
    assert_loaded(net, torch.float32)


@pytest.mark.parametrize("make", SOURCES)
def test_any_change_of_a_file_is_refused_or_loads(make, tmp_path):
    """Nothing else is ever raised; 150 files that somebody has made up, or a disk has spoiled."""
    path, dice, refused = make(tmp_path), random.Random(1), list[str]()
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
    for number in range(150):
        file = files[number % len(files)]
        good = file.read_bytes()
        file.write_bytes(spoiled(good, dice, heads=True))
        try:
            load_weights(Net(), path, strict=False)
        except WeightsError as error:
            refused.append(str(error))
        file.write_bytes(good)
    assert len(refused) > 75  # most of what is changed is a weight's
    assert all(str(path) in message for message in refused)


def test_only_the_rows_that_a_rank_keeps_are_compared(tmp_path):
    rows = torch.zeros(4, CHUNK_BYTES, dtype=torch.uint8)
    save({"state_dict": {"rows": rows}}, tmp_path / "x.ckpt")
    content = bytearray((tmp_path / "x.ckpt").read_bytes())
    content[len(content) // 2] ^= 1  # in the third row, or at the second's end
    (tmp_path / "x.ckpt").write_bytes(content)
    source = open_file(tmp_path / "x.ckpt")
    source.check({"rows": ((0, 1), (0, CHUNK_BYTES))})
    with pytest.raises(WeightsError, match="by their checksum its bytes"):
        source.check({"rows": ((1, 3), (0, CHUNK_BYTES))})


def test_a_stored_piece_that_can_not_be_read_is_named(tmp_path):
    folder = dcp_folder(tmp_path)
    (shard,) = folder.glob("*.distcp")
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(WeightsError, match=r"can't be read \(.* has some of the weights"):
        load_weights(Net(), folder)


def test_missing_files_are_named(tmp_path):
    safetensors_folder(tmp_path)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"names b.safetensors, not in .* \(1 of 2 files\)"):
        load_weights(Net(), tmp_path)
    with pytest.raises(WeightsError, match="doesn't exist"):
        load_weights(Net(), tmp_path / "nowhere")
    folder = dcp_folder(tmp_path / "dcp")
    next(folder.glob("*.distcp")).unlink()
    with pytest.raises(WeightsError, match="is missing"):
        load_weights(Net(), folder)


@pytest.mark.parametrize("make", [safetensors_folder, dcp_folder])
def test_a_folder_of_links_is_read(make, tmp_path):
    """As Hugging Face's cache is one."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    for path in make(tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(f"../blobs/{path.name}")
    net = Net()
    load_weights(net, tmp_path / "snapshot")
    assert_loaded(net, torch.float32)


def test_folders_that_name_files_outside_are_refused(tmp_path):
    folder = dcp_folder(tmp_path / "dcp")
    metadata = dcp.FileSystemReader(folder).read_metadata()
    for place in metadata.storage_data.values():
        place.relative_path = "../" + place.relative_path
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(WeightsError, match="outside the folder: it was refused"):
        load_weights(Net(), folder)


def test_an_index_of_other_files_is_refused(tmp_path):
    index = safetensors_folder(tmp_path) / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {**places, "x": "a.safetensors"}}))
    with pytest.raises(WeightsError, match="x is not in a.safetensors"):
        load_weights(Net(), tmp_path)
    shutil.copy(tmp_path / "a.safetensors", tmp_path.parent / "outside.safetensors")
    index.write_text(json.dumps({"weight_map": {"x": "../outside.safetensors"}}))
    with pytest.raises(WeightsError, match="outside its folder"):
        load_weights(Net(), index)
    index.write_text(json.dumps({"weight_map": {"x": str(tmp_path.parent / "outside.safetensors")}}))
    with pytest.raises(WeightsError, match="outside its folder"):
        load_weights(Net(), index)
    index.write_text("{}")
    with pytest.raises(WeightsError, match="is no index"):
        load_weights(Net(), index)


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def test_pickles_that_run_code_are_refused_and_not_run(tmp_path):
    fuse = tmp_path / "ran"
    torch.save({**weights(), "x": Bomb(fuse)}, tmp_path / "w.pt")
    with pytest.raises(WeightsError, match="would run code; it was refused"):
        load_weights(Net(), tmp_path / "w.pt")
    folder = dcp_folder(tmp_path / "dcp")
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb(fuse)))
    with pytest.raises(WeightsError, match="could run code: the folder was refused"):
        load_weights(Net(), folder)
    (folder / ".metadata").write_bytes(pickle.dumps([1])[:-2])
    with pytest.raises(WeightsError, match="can't be read"):
        load_weights(Net(), folder)
    assert not fuse.exists()


def test_torch_files_without_tensors_or_of_the_old_format_are_refused(tmp_path):
    torch.save({"epoch": 1}, tmp_path / "w.pt")
    with pytest.raises(WeightsError, match="holds no tensors by name but epoch"):
        load_weights(Net(), tmp_path / "w.pt")
    torch.save(weights(), tmp_path / "w.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(WeightsError, match=r"before 1\.6"):
        load_weights(Net(), tmp_path / "w.pt")
