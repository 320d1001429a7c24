"""Pure bfloat16 on two gloo ranks, under DDP and FSDP2, against one process with the whole batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_memkit import PureBF16Precision
from tests.plugins.two_ranks_precision import KINDS, everything, fitted
from tests.processes import run_on_ranks


@pytest.fixture(scope="module", params=[pytest.param("ddp", marks=pytest.mark.slow), "fsdp2"])
def strategy(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def two_ranks(strategy: str, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, dict[str, Tensor]]:
    """All runs of a strategy come from one launch, which takes longer than they do."""
    path = tmp_path_factory.mktemp(strategy) / "found.pt"
    done = run_on_ranks("tests.plugins.two_ranks_precision", str(path), strategy)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(path)


def one_process(folder: Path, strategy: str, plugin: PureBF16Precision | None, prescribed: bool) -> dict:
    """Where FSDP2 makes bfloat16 layers in `configure_model`, so does the one process."""
    return everything(*fitted(plugin=plugin, prescribed=prescribed, early=strategy != "fsdp2", folder=folder))


def assert_same_bits(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Norm of the difference of the float32 weights over their norm: at least that of their norms."""
    first, second = (
        torch.cat([run[name].flatten() for name in run if name.endswith(" float32")]).double()
        for run in (ours, theirs)
    )
    return float((first - second).norm() / second.norm())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.long
def test_the_same_gradients_give_the_same_bits(strategy, two_ranks, kind, tmp_path) -> None:
    """Weights, low halves and moments, whether trained in one go or resumed from Lightning's checkpoint."""
    mode, states, _ = KINDS[kind]
    whole = one_process(tmp_path, strategy, PureBF16Precision(mode, states), prescribed=True)
    assert any(name.endswith("_8bit") for name in whole) == (states == "8-bit")
    assert any(
        name.endswith(("low_half", "low_byte", "compensation")) and value.any()
        for name, value in whole.items()
    )
    assert_same_bits(two_ranks[kind, True], whole)
    assert_same_bits(two_ranks[kind, "resumed"], whole)


@pytest.mark.parametrize("kind", KINDS)
def test_trained_on_two_ranks_is_trained_on_one(strategy, two_ranks, kind, tmp_path) -> None:
    """Half a batch a rank, its bfloat16 gradients averaged: rounded elsewhere than the whole batch's."""
    mode, _, states = KINDS[kind]
    whole = one_process(tmp_path, strategy, PureBF16Precision(mode, states), prescribed=False)
    assert 0 < distance(two_ranks[kind, False], whole) <= 5e-3


def test_float32_on_two_ranks_is_float32_on_one(strategy, two_ranks, tmp_path) -> None:
    whole = one_process(tmp_path, strategy, None, prescribed=False)
    assert distance(two_ranks["float32", False], whole) <= 2e-5
