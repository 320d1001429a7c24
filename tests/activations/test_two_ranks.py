"""Two gloo ranks with each policy, under DDP and FSDP2, are one process with the whole batch."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.activations.two_ranks import POLICIES, build, train


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[torch.Tensor]]]:
    """One launch for all: what each rank found."""
    path = tmp_path_factory.mktemp("ranks") / "found.pt"
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone",
               "-m", "tests.activations.two_ranks", str(path)]  # fmt: skip
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(f"{path}.{rank}") for rank in (0, 1)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_are_one_process(
    ranks: list[dict[str, list[torch.Tensor]]], strategy: str, policy: str
) -> None:
    alone = build()
    train(alone, slice(None))
    expected = [tensor for p in alone.parameters() for tensor in (p.detach(), p.grad)]
    for rank in ranks:
        for ours, plain, none in zip(
            rank[f"{strategy} {policy}"], expected, rank[f"{strategy} none"], strict=True
        ):
            assert torch.equal(ours, none)
            torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
