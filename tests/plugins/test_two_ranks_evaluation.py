"""Two gloo ranks evaluate under DDP and FSDP2: a fault on one leaves no rank waiting, and the whole's results."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.processes import run_on_ranks

Found = dict[str, list[Any]]


@pytest.fixture(
    scope="module",
    params=[pytest.param(("ddp", "9"), marks=pytest.mark.slow), ("fsdp2", "9")]
    + [pytest.param((kind, "1"), marks=pytest.mark.slow) for kind in ("ddp", "fsdp2")],
    ids=lambda param: "-".join(param),
)
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, list[Found]]:
    """One launch a strategy, in which a case that takes a minute ends both ranks; both ranks' results."""
    path = tmp_path_factory.mktemp("ranks") / "found.pt"
    done = run_on_ranks("tests.plugins.two_ranks_evaluation", str(path), *request.param)
    assert done.returncode == 0, done.stderr[-3000:]
    return request.param[0], [torch.load(f"{path}.{rank}") for rank in (0, 1)]


@pytest.mark.long
def test_parts_and_retries_give_the_whole_batches_results_on_each_rank(
    found: tuple[str, list[Found]],
) -> None:
    """Losses, metrics, sums over ranks, predictions, and how many rows a module has counted."""
    _, ranks = found
    for results in ranks:
        for name, (whole, parts) in results.items():
            if name in ("refused", "error"):
                continue
            assert parts["metrics"] == pytest.approx(whole["metrics"], rel=1e-7), (
                name
            )  # Lightning keeps float32
            assert parts.get("rows") == whole.get("rows"), name
            if "predict" in name:
                for one, other in zip(tensors(parts["result"]), tensors(whole["result"]), strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_fault_on_one_rank_is_repeated_by_all_that_meet_in_the_step(found: tuple[str, list[Found]]) -> None:
    """Under DDP a step that does not communicate is repeated by its own rank alone."""
    strategy, ranks = found
    points = [name for name in ranks[0] if ", " in name.replace("gathers, ", "") or "allocation" in name]
    assert len(points) >= 8
    for name in points:
        retries = [results[name][1]["retries"] for results in ranks]
        sizes = [results[name][1]["sizes"] for results in ranks]
        meets = strategy == "fsdp2" or "gathers" in name
        assert retries == ([1, 1] if meets else [0, 1]), name
        assert (4 in sizes[0][6:]) == meets or "allocation" not in name
        assert 4 in sizes[1][6:], name


def test_a_first_batch_that_fails_on_one_rank_is_split_on_all_that_meet(
    found: tuple[str, list[Found]],
) -> None:
    strategy, ranks = found
    for name in ("first batch", "gathers, first batch"):
        if name in ranks[0]:
            largest = [max(results[name][1]["sizes"][-4:]) for results in ranks]
            alone = strategy == "ddp" and name == "first batch"
            assert largest == ([8, 4] if alone else [4, 4])


def test_a_rank_with_fewer_samples_than_parts_repeats_one_or_says_why_not(
    found: tuple[str, list[Found]],
) -> None:
    strategy, ranks = found
    if strategy == "fsdp2":
        whole, parts = ranks[1]["repeats"]
        assert parts["sizes"][-3:] == [1, 1, 1]
        assert whole["sizes"][-1] == 2
        assert max(ranks[0]["auto"][1]["sizes"][-4:]) < 8
    else:
        for results in ranks:
            assert "a rank's batch has 2 samples: ranks exchange results" in results["refused"][1]["result"]


def test_a_step_that_returns_something_on_one_rank_runs_whole_on_all_that_meet(
    found: tuple[str, list[Found]],
) -> None:
    _, ranks = found
    for results in ranks:
        whole, parts = results["returns"]
        assert parts["sizes"][-3:] == whole["sizes"][-3:] == [8, 8, 8]
        assert 5 in parts["sizes"]  # compared


def test_another_error_surfaces_and_ends_the_ranks_that_wait_for_it(found: tuple[str, list[Found]]) -> None:
    strategy, ranks = found
    if strategy == "ddp":
        assert ranks[1]["error"][1]["result"] == "KeyError: 'labels'"
        assert ranks[0]["error"][1]["result"].startswith("PeerEndedError: Rank 1 ended with an error")


def test_buffers_are_rank_zero_s_once_a_batch_however_many_its_parts(found: tuple[str, list[Found]]) -> None:
    """DDP broadcasts them in each forward, which parts of unequal number would not pair up."""
    strategy, ranks = found
    if strategy == "ddp":
        for results in ranks:
            whole, parts = results["buffers"]
            assert all(torch.equal(a, b) for a, b in zip(whole["buffers"], parts["buffers"], strict=True))
        assert [results["buffers"][1]["sizes"].count(3) > 0 for results in ranks] == [True, False]


def test_a_fault_in_a_fit_s_validation_leaves_training_alone(found: tuple[str, list[Found]]) -> None:
    strategy, ranks = found
    for rank, results in enumerate(ranks):
        sound, faulty = results["fit"]
        assert all(torch.equal(a, b) for a, b in zip(sound["weights"], faulty["weights"], strict=True))
        assert sound["retries"] == 0
        assert faulty["retries"] == (1 if strategy == "fsdp2" else rank)
        assert faulty["history"] == sound["history"] == [(0, 8)]


def tensors(item: Any) -> list[Tensor]:
    if isinstance(item, Tensor):
        return [item]
    items = item.values() if isinstance(item, dict) else item
    return [tensor for one in items for tensor in tensors(one)]
