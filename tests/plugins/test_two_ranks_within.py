"""Gloo ranks, each with a loss over its whole batch or rows that don't fit: modules in chunks, and one rank's OOM."""

from pathlib import Path

import pytest
import torch

from tests.processes import run_on_ranks


@pytest.mark.long
def test_ranks_agree_on_chunks_and_on_smaller_ones(tmp_path: Path) -> None:
    path = tmp_path / "found.pt"
    done = run_on_ranks("tests.plugins.two_ranks_within", str(path))
    assert done.returncode == 0, done.stderr[-3000:]
    zero, one = (torch.load(f"{path}.{rank}") for rank in (0, 1))
    assert zero["sizes"] == one["sizes"]
    for (chunk,), (first, second) in (zero["sizes"][:2], zero["sizes"][2:]):
        assert chunk == first > second == (first + 1) // 2
    assert zero["retries"] == one["retries"] == 1
    for name in ("chunks", "failed"):
        assert torch.equal(zero[name], one[name])
        assert float((zero[name] - zero["plain"]).abs().max()) <= 1e-11
    for name in ("tokens", "failed tokens"):
        assert torch.equal(zero[name], one[name])
        assert float((zero[name] - zero["plain rows"]).abs().max()) <= 1e-11


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_sharded_ranks_gather_around_chunks(ranks: int, tmp_path: Path) -> None:
    """FSDP2; negatives of the rank's batch, and of all ranks'."""
    path = tmp_path / "found.pt"
    done = run_on_ranks("tests.plugins.within_shards", str(path), str(ranks), ranks=ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    first, *others = (torch.load(f"{path}.{rank}") for rank in range(ranks))
    sizes = first["sizes"]
    assert all(one["sizes"] == sizes for one in others)
    for name, reference in (
        ("chunks", "plain"),
        ("failed", "plain"),
        ("gathered", "plain gathered"),
        ("tokens", "plain rows"),
        ("failed tokens", "plain rows"),
    ):
        assert all(sizes[name]), name
        assert len(sizes[name]) == (2 if "failed" in name else 1)
        for weight, plain in first[reference].items():
            assert float((first[name][weight] - plain).abs().max()) <= 1e-11, (name, weight)
    assert first["gathers"]["chunks"] == first["gathers"]["plain"]
