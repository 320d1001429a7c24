"""Checkpoints of pure bfloat16 from two gloo ranks, under DDP and FSDP2: resumed bit for bit, and consolidated."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.plugins.two_ranks_checkpoints import CASES
from tests.processes import run_on_ranks


@pytest.fixture(scope="module", params=[pytest.param("ddp", marks=pytest.mark.slow), "fsdp2"])
def two_ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[Any, dict[str, Tensor]]:
    """All runs of a strategy come from one launch, which takes longer than they do."""
    path = tmp_path_factory.mktemp(request.param) / "found.pt"
    done = run_on_ranks("tests.plugins.two_ranks_checkpoints", str(path), request.param)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(path)


@pytest.mark.parametrize(("mode", "whole"), CASES)
@pytest.mark.long
def test_a_resume_is_bitwise(two_ranks, mode, whole):
    """Compact states: the rounding noise goes on where it stood, too."""
    straight, resumed = two_ranks[mode, whole, "straight"], two_ranks[mode, whole, "resumed"]
    assert straight.keys() == resumed.keys()
    for name, value in straight.items():
        assert value.dtype == resumed[name].dtype, name
        assert torch.equal(value, resumed[name]), name
    half = two_ranks[mode, whole, "half"]
    assert any(not torch.equal(value, half[name]) for name, value in straight.items())


@pytest.mark.parametrize("mode", [mode for mode, whole in CASES if whole and mode != "stochastic"])
def test_a_file_that_the_ranks_gathered_consolidates_to_the_exact_weights(two_ranks, mode):
    weights, half = two_ranks[mode, True, "consolidated"], two_ranks[mode, True, "half"]
    for name, value in weights.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, half[f"{name} float32"]), name
        assert not torch.equal(value, value.bfloat16().float())
