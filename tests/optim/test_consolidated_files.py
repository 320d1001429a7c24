"""Folders, streamed files and plain ones become one file that plain Lightning loads."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import nn

from lightning_memkit.checkpoints.errors import CheckpointError
from lightning_memkit.checkpoints.files import save
from lightning_memkit.checkpoints.sharded import save_sharded
from lightning_memkit.cli import main
from lightning_memkit.optim.compensation import compensate
from lightning_memkit.optim.consolidate import NAMES_KEY, consolidate_checkpoint, parameter_names
from lightning_memkit.optim.consolidated_files import consolidate_file, read_checkpoint
from lightning_memkit.utilities.errors import NoEffectWarning
from tests.checkpoints.test_files import assert_same


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle, self.head = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight


def trained(dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    """A module after a step, and its checkpoint as Lightning forms it."""
    torch.manual_seed(0)
    model = Tied().to(dtype)
    groups = [
        {"params": [model.middle.bias], "lr": 0.1},
        {"params": [model.embed.weight, model.middle.weight]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    if dtype == torch.bfloat16:
        compensate(optimizer, mode="split")
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    checkpoint: dict[str, Any] = {
        "epoch": 3,
        "pytorch-lightning_version": "2.6.6",
        "hyper_parameters": {"width": 4},
        "loops": {"fit_loop": {}},
        "state_dict": dict(model.state_dict()),
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [],
        "callbacks": {},
    }
    if dtype == torch.bfloat16:
        checkpoint["PureBF16Precision"] = {NAMES_KEY: parameter_names(model, [optimizer])}
    return model, optimizer, checkpoint


def as_folder(
    checkpoint: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, path: Path
) -> Path:
    """As ranks write it: an optimizer's parameters go by their first names."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    in_order = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    saved = copy.deepcopy(checkpoint["optimizer_states"][0])
    saved["state"] = {in_order[number]: state for number, state in saved["state"].items()}
    for group in saved["param_groups"]:
        group["params"] = [in_order[number] for number in group["params"]]
    rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
    save_sharded({"state_dict": checkpoint["state_dict"], "optimizer_0": saved}, rest, path)
    return path


def sources(dtype: torch.dtype, folder: Path) -> tuple[dict[str, Any], dict[str, Path]]:
    model, optimizer, checkpoint = trained(dtype)
    torch.save(checkpoint, folder / "plain.ckpt")
    save(checkpoint, folder / "streamed.ckpt")
    return checkpoint, {
        "plain": folder / "plain.ckpt",
        "streamed": folder / "streamed.ckpt",
        "sharded": as_folder(checkpoint, model, optimizer, folder / "sharded.ckpt"),
    }


@pytest.mark.parametrize("kind", ["plain", "streamed", "sharded"])
def test_bfloat16_becomes_float32_from_every_kind(kind: str, tmp_path: Path) -> None:
    checkpoint, places = sources(torch.bfloat16, tmp_path)
    assert_same(checkpoint["optimizer_states"], list(read_checkpoint(places[kind])["optimizer_states"]))
    loaded = torch.load(consolidate_file(places[kind], tmp_path / "out.ckpt"), weights_only=True)
    expected = consolidate_checkpoint(checkpoint)
    assert loaded.keys() == expected.keys()
    for key, value in expected.items():
        assert_same(value, loaded[key], key)
    assert loaded["state_dict"]["head.weight"].dtype == torch.float32
    assert torch.equal(loaded["state_dict"]["head.weight"], loaded["state_dict"]["embed.weight"])
    again = Tied()
    again.load_state_dict(loaded["state_dict"])


@pytest.mark.parametrize("kind", ["streamed", "sharded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_may_be_kept(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Float32 has nothing to widen, so that it says nothing of that."""
    checkpoint, places = sources(dtype, tmp_path)
    keep = dtype == torch.bfloat16
    loaded = torch.load(
        consolidate_file(places[kind], tmp_path / "out.ckpt", keep_dtypes=keep), weights_only=True
    )
    for key, value in checkpoint.items():
        assert_same(value, loaded[key], key)


@pytest.mark.parametrize("kind", ["plain", "streamed", "sharded"])
def test_weights_alone(kind: str, tmp_path: Path) -> None:
    checkpoint, places = sources(torch.bfloat16, tmp_path)
    wide = consolidate_checkpoint(checkpoint)["state_dict"]
    loaded = torch.load(
        consolidate_file(places[kind], tmp_path / "w.ckpt", weights_only=True), weights_only=True
    )
    assert set(loaded) == {"epoch", "pytorch-lightning_version", "hyper_parameters", "state_dict"}
    assert_same(wide, loaded["state_dict"])
    tensors = load_file(consolidate_file(places[kind], tmp_path / "w.safetensors"))
    assert set(tensors) == set(wide) - {"head.weight"}
    model = Tied()
    load_model(model, tmp_path / "w.safetensors")
    assert_same(wide, dict(model.state_dict()))
    narrow = consolidate_file(places[kind], tmp_path / "n.safetensors", keep_dtypes=True)
    assert {tensor.dtype for tensor in load_file(narrow).values()} == {torch.bfloat16}


def test_keeping_what_is_kept_anyway_says_so(tmp_path: Path) -> None:
    _, places = sources(torch.bfloat16, tmp_path)
    with pytest.warns(NoEffectWarning, match="keep_dtypes=True leaves"):
        consolidate_file(places["plain"], tmp_path / "out.ckpt", keep_dtypes=True)


def test_the_command_takes_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint, places = sources(torch.float32, tmp_path)
    out = tmp_path / "out.ckpt"
    assert main(["consolidate", str(places["sharded"]), "--output", str(out)]) == 0
    assert_same(checkpoint["optimizer_states"], torch.load(out, weights_only=True)["optimizer_states"])
    words = ["consolidate", str(places["sharded"]), str(out), "--overwrite", "--weights-only"]
    assert main(words) == 0
    assert "optimizer_states" not in torch.load(out, weights_only=True)
    with pytest.raises(SystemExit):
        main(["consolidate", str(places["sharded"]), str(out), "--output", str(out)])
    capsys.readouterr()
    next(places["sharded"].glob("*.distcp")).unlink()
    assert main(["consolidate", str(places["sharded"]), "--output", str(tmp_path / "new.ckpt")]) == 1
    assert "is missing; nothing was loaded" in capsys.readouterr().err
    assert not (tmp_path / "new.ckpt").exists()


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    _, places = sources(torch.float32, tmp_path)
    with pytest.raises(ValueError, match="has no .metadata"):
        consolidate_file(tmp_path, tmp_path / "out.ckpt")
    with pytest.raises(IsADirectoryError, match="give the name of a file"):
        consolidate_file(places["plain"], tmp_path)
    (places["sharded"] / "meta.pt").unlink()
    with pytest.raises(CheckpointError, match=r"has no meta.pt"):
        consolidate_file(places["sharded"], tmp_path / "out.ckpt")
