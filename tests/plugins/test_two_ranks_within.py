"""Two gloo ranks under DDP, each with a loss over its whole batch: modules in chunks, and one rank's OOM."""

from pathlib import Path

import torch

from tests.processes import run_on_ranks


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
