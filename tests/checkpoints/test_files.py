"""States as files: every kind of value round-trips, and what can't is refused by name."""

import argparse
import enum
import math
import os
import subprocess
import sys
import warnings
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

from lightning_memkit.checkpoints import checksums
from lightning_memkit.checkpoints.background import host_copies
from lightning_memkit.checkpoints.documents import encode
from lightning_memkit.checkpoints.errors import CheckpointError
from lightning_memkit.checkpoints.files import load, save, snapshot
from lightning_memkit.checkpoints.sharded import save_sharded
from lightning_memkit.optim.compensation import compensate
from lightning_memkit.optim.eight_bit import is_bitsandbytes

MIB = 1024**2
DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip


def through_a_file(state: Any, folder: Path) -> Any:
    save(state, folder / "state.ckpt")
    return load(folder / "state.ckpt")


def nested(layout: Any) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*nested tensors is in prototype")
        return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=layout)


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def assert_same(one: Any, other: Any, place: str = "state") -> None:
    """Same types, same order, same bits."""
    if isinstance(one, Tensor):
        assert isinstance(other, Tensor), place
        assert (one.dtype, one.shape) == (other.dtype, other.shape), place
        assert torch.equal(bits(one), bits(other)), place
        return
    assert type(one) is type(other), place
    if isinstance(one, dict):
        assert list(one) == list(other), place
        for key in one:
            assert_same(one[key], other[key], f"{place}[{key!r}]")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), place
        for number, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{place}[{number}]")
    elif isinstance(one, float) and math.isnan(one):
        assert math.isnan(other), place
    else:
        assert one == other, place


def test_every_kind_of_value_comes_back(tmp_path: Path) -> None:
    state = {
        "none": None,
        "numbers": [True, False, 0, -7, 2**80, 0.1, -0.0, 1e-300, math.inf, -math.inf, math.nan, 3 - 4j],
        "texts": ["", "ä\n\0", "\ud800", 'quote"'],
        "bytes": bytes(range(256)),
        "tuple": (1, (2, [3])),
        "set": {1, 2},
        "size": torch.Size([2, 3]),
        "torch": [torch.bfloat16, torch.device("cuda:1")],
        "ordered": OrderedDict(b=1, a=2),
        "counter": Counter({5: 2, 1: 1}),
        "keys": {0: "a", "0": "b", None: 1, 1.5: 2, (1, "x"): 3, True + 1: 4},
        "empty": [{}, [], (), "", OrderedDict()],
        "looks like ours": {"tensor": "weight", "dict": {"float": "nan"}},
    }
    assert_same(state, through_a_file(state, tmp_path))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (6 * dtype.itemsize,), dtype=torch.uint8)
    matrix = raw.view(dtype).reshape(2, 3)
    state = {
        "matrix": matrix,
        "scalar": matrix[1, 1],
        "empty": matrix[:0],
        "transposed": matrix.t(),
        "slice": matrix[:, 1],
        "expanded": matrix[:1].expand(4, 3),
        "odd": torch.zeros(1, dtype=torch.uint8),
    }
    assert_same(state, through_a_file(state, tmp_path))


def test_views_that_are_computed_when_read_come_back(tmp_path: Path) -> None:
    plain = torch.randn(3, dtype=torch.complex64)
    state = {"plain": plain, "conjugate": plain.conj(), "negative": plain.conj().imag}
    loaded = through_a_file(state, tmp_path)
    assert_same(state, loaded)
    assert torch.equal(loaded["conjugate"], plain.conj())


def test_a_parameter_comes_back_as_its_tensor(tmp_path: Path) -> None:
    loaded = through_a_file({"p": nn.Parameter(torch.ones(2))}, tmp_path)["p"]
    assert type(loaded) is Tensor
    assert not loaded.requires_grad


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.norm = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False), nn.BatchNorm1d(4)
        self.head.weight = self.embed.weight


def test_weights_are_plain_safetensors_and_tied_ones_are_written_once(tmp_path: Path) -> None:
    model = Tied()
    save({"state_dict": model.state_dict(), "epoch": 3}, tmp_path / "tied.ckpt")
    names = [name for name in load_file(tmp_path / "tied.ckpt") if "/" not in name]
    assert sorted(names) == sorted(set(model.state_dict()) - {"head.weight"})
    with safe_open(tmp_path / "tied.ckpt", "pt") as file:
        assert file.metadata()["head.weight"] == "embed.weight"
    other = Tied()
    missing, _ = load_model(other, tmp_path / "tied.ckpt", strict=False)
    assert not missing
    assert_same(model.state_dict(), other.state_dict())
    state = load(tmp_path / "tied.ckpt")["state_dict"]
    assert state["head.weight"] is state["embed.weight"]
    assert state._metadata == model.state_dict()._metadata  # pyright: ignore[reportAttributeAccessIssue]
    moved = load(tmp_path / "tied.ckpt", map_location="meta")["state_dict"]
    assert moved["head.weight"] is moved["embed.weight"]
    assert moved["head.weight"].is_meta


def test_names_that_collide_are_told_apart(tmp_path: Path) -> None:
    state = {
        "state_dict": {
            "a/b": torch.zeros(1),
            "__metadata__": torch.ones(1),
            "memkit/structure": torch.ones(2),
        },
        "a": {"b": torch.ones(3), "c": {1: torch.ones(4), "1": torch.ones(5)}},
    }
    assert_same(state, through_a_file(state, tmp_path))


def trained(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return trained(torch.optim.AdamW(model.parameters(), lr=1e-2), model)


def kahan(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.bfloat16().parameters(), lr=1e-2)
    compensate(optimizer, mode="kahan")
    return trained(optimizer, model)


def split(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.bfloat16().parameters(), lr=1e-2)
    compensate(optimizer, mode="split", states="exact")
    return trained(optimizer, model)


def eight_bit(model: nn.Module) -> torch.optim.Optimizer:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    optimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-2)
    assert is_bitsandbytes(optimizer)
    return trained(optimizer, model)


def test_a_single_element_comes_back_whatever_its_stride(tmp_path: Path) -> None:
    base = torch.arange(10.0)
    state = {
        "slice": base[1::2][:1],
        "square": base.as_strided((1, 1), (7, 3), 4),
        "negative": torch.tensor([1 + 2j, 3 + 4j]).conj().imag[1:],
        "half": base.half()[::3][:1],
        "complex": (base + 1j)[::2][:1].conj(),
    }
    saved = through_a_file(state, tmp_path)
    copied = through_a_file(host_copies(state), tmp_path)
    for name, value in state.items():
        assert torch.equal(saved[name], value), name
        assert torch.equal(copied[name], value), name
        assert saved[name].dtype == copied[name].dtype == value.dtype


def test_host_copies_keep_a_tensor_and_its_conjugate_apart() -> None:
    plain = torch.tensor([1 + 2j])
    copies = host_copies([plain, plain.conj(), plain])
    assert [copy.resolve_conj().item() for copy in copies] == [1 + 2j, 1 - 2j, 1 + 2j]
    assert copies[0] is copies[2]


@pytest.mark.parametrize("make", [adamw, kahan, split, eight_bit], ids=lambda make: make.__name__)
def test_optimizer_states_come_back_bit_for_bit(make: Any, tmp_path: Path) -> None:
    optimizer = make(nn.Linear(64, 64))
    state = {"optimizer_states": [optimizer.state_dict()]}
    dtypes = {value.dtype for value in encode(state).tensors.values()}
    assert {"kahan": torch.bfloat16, "split": torch.int16, "eight_bit": torch.uint8}.get(
        make.__name__, torch.float32
    ) in dtypes
    assert_same(state, through_a_file(state, tmp_path))


def test_tensors_that_hold_tensors_come_back_if_their_package_is_loaded(tmp_path: Path, monkeypatch) -> None:
    kind = pytest.importorskip("torchao.optim.subclass_8bit").OptimState8bit
    state = kind.zeros((4, 64), block_size=64)
    state.codes.random_(0, 256)
    loaded = through_a_file({"exp_avg": state}, tmp_path)["exp_avg"]
    assert type(loaded) is kind
    assert loaded.shape == state.shape
    names, context = state.__tensor_flatten__()
    assert loaded.__tensor_flatten__()[1] == context
    assert all(torch.equal(getattr(loaded, name), getattr(state, name)) for name in names)
    monkeypatch.setattr(torch.serialization, "get_safe_globals", list)
    with pytest.raises(CheckpointError, match="import torchao first"):
        load(tmp_path / "state.ckpt")
    with pytest.raises(CheckpointError, match="add_safe_globals"):
        save({"exp_avg": state}, tmp_path / "other.ckpt")


SCHEDULERS: dict[str, dict[str, Any]] = {
    "LambdaLR": {"lr_lambda": lambda step: 0.5},
    "MultiplicativeLR": {"lr_lambda": lambda step: 0.5},
    "StepLR": {"step_size": 2},
    "MultiStepLR": {"milestones": [1, 3]},
    "ConstantLR": {},
    "LinearLR": {},
    "ExponentialLR": {"gamma": 0.9},
    "PolynomialLR": {},
    "CosineAnnealingLR": {"T_max": 4},
    "CosineAnnealingWarmRestarts": {"T_0": 2},
    "CyclicLR": {"base_lr": 0.1, "max_lr": 1.0},
    "OneCycleLR": {"max_lr": 1.0, "total_steps": 9},
    "ReduceLROnPlateau": {},
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_states_of_schedulers_come_back(name: str, tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1, momentum=0.9)
    scheduler = getattr(torch.optim.lr_scheduler, name)(optimizer, **SCHEDULERS[name])
    optimizer.step()
    scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
    loaded = through_a_file(scheduler.state_dict(), tmp_path)
    assert_same(scheduler.state_dict(), loaded)
    scheduler.load_state_dict(loaded)


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (Path("x"), r"save str\(path\)"),
        (np.float64(1), r"save value.item\(\)"),
        (np.ones(2), "torch.from_numpy"),
        (Colour.RED, "save member.value"),
        (nn.Linear(1, 1), "save_hyperparameters"),
        (argparse.Namespace(x=1), "vars"),
        (print, "print"),
        (torch.optim.SGD, "SGD"),
        (torch.ones(2).to_sparse(), "layout torch.sparse_coo"),
        (nested(torch.strided), "a nested tensor and can't be saved; save its components"),
        (nested(torch.jagged), "layout torch.jagged"),
        (torch.ones(2, device="meta"), "meta device"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_needs_code_is_refused_with_its_place_and_a_remedy(
    value: Any, what: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=what) as refused:
        save({"hyper_parameters": {"layers": [0, value]}}, tmp_path / "state.ckpt")
    assert "checkpoint['hyper_parameters']['layers'][1]" in str(refused.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (nested(torch.strided), "nested tensor"),
        (nested(torch.jagged), "torch.jagged"),
        (torch.ones(2).to_sparse(), "sparse_coo"),
        (torch.ones(2, device="meta"), "without data"),
    ],
)
def test_ranks_refuse_such_tensors_with_their_place_and_write_nothing(
    value: Tensor, what: str, tmp_path: Path
) -> None:
    shares = {"state_dict": {"a": torch.ones(1), "layers": [{"w": value}]}}
    with pytest.raises(CheckpointError, match=what) as refused:
        save_sharded(shares, {}, tmp_path / "shards")
    assert "checkpoint['state_dict']['layers'][0]['w']" in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_a_state_that_contains_itself_is_refused(tmp_path: Path) -> None:
    state: dict[str, Any] = {"again": []}
    state["again"].append(state)
    with pytest.raises(CheckpointError, match="contains itself"):
        save(state, tmp_path / "state.ckpt")


def test_writing_into_what_was_loaded_leaves_the_file_alone(tmp_path: Path) -> None:
    loaded = through_a_file({"w": torch.zeros(4)}, tmp_path)["w"]
    loaded += 1
    assert torch.equal(load(tmp_path / "state.ckpt")["w"], torch.zeros(4))


def test_a_snapshot_does_not_see_what_happens_later() -> None:
    weight = torch.zeros(3)
    copied = snapshot(encode({"w": weight, "again": weight}))
    weight += 1
    assert list(copied.tensors) == ["w"]
    assert torch.equal(copied.tensors["w"], torch.zeros(3))


def test_files_of_torch_save_are_read(tmp_path: Path) -> None:
    state = {"state_dict": nn.Linear(2, 2).state_dict(), "epoch": 1, "lr": Counter({1: 2})}
    torch.save(state, tmp_path / "zip.ckpt")
    torch.save(state, tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    for name in ("zip.ckpt", "old.ckpt"):
        assert_same(dict(state["state_dict"]), dict(load(tmp_path / name)["state_dict"]))


PEAK = """
import sys, torch
from lightning_memkit.checkpoints.files import load, save
from tests.checkpoints.peak import peak_growth
state = {"state_dict": {str(n): torch.full((2**20, 4), float(n)) for n in range(12)}}
state["t"] = torch.ones(2**10, 2**10).t()
save({"warm": torch.ones(2**10, 2**10).t()}, sys.argv[1] + "/warm.ckpt"), load(sys.argv[1] + "/warm.ckpt")
print(peak_growth(lambda: save(state, sys.argv[1] + "/state.ckpt")))
del state
print(peak_growth(lambda: load(sys.argv[1] + "/state.ckpt")))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux resets the peak of a process")
@pytest.mark.long
def test_neither_saving_nor_loading_takes_a_second_copy(tmp_path: Path) -> None:
    """192 MiB of weights: less than a tensor of 16 MiB is added at any moment; each thread that checks holds 1 MiB."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    saving, loading = map(int, done.stdout.split())
    assert saving < 20 * MIB
    assert loading < (6 + min(checksums._THREADS, os.cpu_count() or 1)) * MIB
