from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import launched, two_ranks
from tests.distributed.two_ranks_fsdp2 import OPTIONS, WHO
from tests.processes import LIMIT_SECONDS, selected

SWEEPS = [f"{option}, {who}" for option in OPTIONS for who in (*WHO, "cold")]


@pytest.fixture(scope="module", params=["29", pytest.param("1", marks=pytest.mark.slow)])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One launch for all: every allocation, which takes a busy machine many times as long, or one in so many."""
    limit = LIMIT_SECONDS * (6 if request.param == "1" else 1)
    folder = tmp_path_factory.mktemp("fsdp2")
    return two_ranks("two_ranks_fsdp2", folder, request.param, *selected(request, "sweep"), limit=limit)


@pytest.mark.parametrize("sweep", SWEEPS)
@pytest.mark.long
def test_a_retry_after_any_allocation_failed_is_bitwise_a_run_without_the_fault(
    found: dict[str, Any], sweep: str
) -> None:
    case = found[sweep]
    assert case["points"] > 0
    assert case["retried"] == case["points"]
    assert case["equal"] == case["points"]


@pytest.mark.parametrize("sweep", ["validated", "storages", "storages, checkpointed", "first forward"])
def test_so_is_one_after_a_validation_and_where_the_engine_fails_by_itself(
    found: dict[str, Any], sweep: str
) -> None:
    assert found[sweep]["points"] > 0
    assert found[sweep]["equal"] == found[sweep]["points"]
    assert found[sweep].get("retried", found[sweep]["points"]) == found[sweep]["points"]


def test_clipping_is_torchs_bitwise_and_fails_on_all_ranks_or_none(found: dict[str, Any]) -> None:
    clipping = found["clipping"]
    assert clipping["equal"] == 6
    assert clipping["points"] >= 6
    assert clipping["all raised"] == clipping["unchanged"] == clipping["points"]


def test_a_part_that_does_not_count_adds_exactly_nothing(found: dict[str, Any]) -> None:
    assert found["silent"] == {"equal": True, "finite": True}


def test_what_can_not_be_caught_up_is_named(found: dict[str, Any]) -> None:
    refusals = found["refusals"]
    assert refusals["plain"] == ""
    assert "HSDP" in refusals["replicated"]
    assert "set_all_reduce_hook" in refusals["hook"]
    assert refusals["own"] == "OwnGather replaces FSDP2's collectives"
    assert "has no _modules_to_run_forward" in refusals["older"]


@pytest.mark.parametrize(
    ("how", "why"), [("meets", "collectives that are not FSDP2's"), ("first", "no earlier one tells")]
)
def test_a_rank_that_can_not_catch_up_ends_and_its_peers_with_it(tmp_path: Path, how: str, why: str) -> None:
    """The launch's own limit is what a hang would run into."""
    done = launched("two_ranks_stranded", str(tmp_path), how)
    assert done.returncode == 0, done.stderr[-3000:]
    told = [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)]
    assert told[1].startswith("CannotCatchUpError")
    assert why in told[1]
    assert told[0].startswith("RuntimeError")
