"""Two gloo ranks under DDP, ZeRO-1 and FSDP2 through Lightning's strategies: steps that fail are all ranks' again."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memkit.micro_batching.ranks.agreement import ranks_of
from lightning_memkit.plugins.seams.lightning_run import LightningRun
from tests.plugins.toys import trainer
from tests.processes import run_on_ranks

KINDS = ("ddp", "zero1", "fsdp2")


def launched(*arguments: str) -> None:
    done = run_on_ranks("tests.plugins.two_ranks_ranks", *arguments)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(
    scope="module",
    params=[("ddp", "23"), ("fsdp2", "23")]
    + [pytest.param(one, marks=pytest.mark.slow) for one in (("zero1", "23"), *((k, "1") for k in KINDS))],
    ids=lambda param: "-".join(param),
)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One launch a strategy: every allocation, or one in so many."""
    path = tmp_path_factory.mktemp("ranks") / "found.pt"
    launched(str(path), *request.param)
    return torch.load(path)


@pytest.mark.parametrize("phase", ["cold", "warm"])
@pytest.mark.long
def test_a_fault_on_one_rank_is_retried_on_all_and_leaves_no_trace(found: dict[str, Any], phase: str) -> None:
    case = found[phase]
    assert case["points"] > 0
    assert case["retried"] == case["points"]
    assert case["equal"] == case["points"]


def test_a_fault_in_the_optimizers_step_is_repaired_on_its_rank(found: dict[str, Any]) -> None:
    assert found["optimizer"]["points"] > 0
    assert found["optimizer"]["equal"] == found["optimizer"]["points"]
    assert found["optimizer"]["retried"] == 0


def test_a_fault_in_a_hook_before_the_step_reaches_the_peers_where_they_agree(found: dict[str, Any]) -> None:
    assert found["hook"] == {"equal": True, "retried": 1}


def test_without_a_fault_the_step_is_bitwise_the_strategys_own(found: dict[str, Any]) -> None:
    assert found["own"] is True


def test_without_recovery_the_strategy_is_left_alone(found: dict[str, Any]) -> None:
    assert found["unretried"] == "recover=False"


def test_ranks_of_unequal_size_agree_on_the_largest(found: dict[str, Any]) -> None:
    assert found["largest"] == 4


@pytest.mark.parametrize("kind", ["ddp"])
def test_an_error_of_another_kind_surfaces_and_ends_the_peers(tmp_path: Path, kind: str) -> None:
    launched(str(tmp_path / "found.pt"), kind, "0")
    assert (tmp_path / "1.txt").read_text() == "KeyError"
    assert (tmp_path / "0.txt").read_text() == "PeerEndedError"


def test_a_rank_alone_does_everything_at_once() -> None:
    ranks = ranks_of(LightningRun(trainer()))
    ranks.begin_step(starts_window=True)
    assert ranks.attempt(lambda: ranks.part(lambda: 3, counts=False, last=True), ends_window=True) == 3
    assert ranks.most_parts(2) == ranks.largest(2) == 2
    assert ranks.clip([torch.nn.Parameter(torch.ones(1))], 1.0) is False
    ranks.optimizer_steps()
    ranks.failed()
    ranks.close()
    assert ranks.reason == ""
