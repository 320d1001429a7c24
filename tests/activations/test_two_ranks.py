"""Two gloo ranks with each policy, under DDP, FSDP2 and tensor parallelism, are one process with the whole batch."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.activations.two_ranks import STRATEGIES, build, cases, result, train
from tests.processes import run_on_ranks

Found = dict[tuple[str, ...], dict[str, Any]]
SAMPLE, MORE, COMPILED = cases("sample"), cases("more"), cases("compiled")
GATHERED_BYTES = (2 * 32 * 128 + 128 + 3 * 32) * 8  # a block's weights, which FSDP2 may still hold


def launched(folder: Path, part: str) -> list[Found]:
    """What each rank found."""
    done = run_on_ranks("tests.activations.two_ranks", str(folder / "found.pt"), part)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"found.pt.{rank}") for rank in (0, 1)]


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """One launch for every policy that doesn't compile."""
    return launched(tmp_path_factory.mktemp("sample"), "sample")


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """One launch for other models, other settings of the strategies, and both orders of patching."""
    return launched(tmp_path_factory.mktemp("more"), "more")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """One launch for the policies that compile."""
    return launched(tmp_path_factory.mktemp("compiled"), "compiled")


def alone(name: str) -> list[torch.Tensor]:
    """One process, the whole batch, no checkpointing."""
    model = build(name)
    train(model, slice(None), name)
    return result(model)


def assert_bitwise(ranks: list[Found], key: tuple[str, ...]) -> None:
    for rank in ranks:
        none = rank[key[0], key[1], "none"]["tensors"]
        for ours, plain in zip(rank[key]["tensors"], none, strict=True):
            assert torch.equal(ours, plain)


def assert_close(ranks: list[Found], key: tuple[str, ...], tolerance: float) -> None:
    for rank in ranks:
        for ours, plain in zip(rank[key]["tensors"], alone(key[0]), strict=True):
            torch.testing.assert_close(ours, plain, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("key", SAMPLE, ids=" ".join)
@pytest.mark.long
def test_two_ranks_are_one_process(sample: list[Found], key: tuple[str, ...]) -> None:
    assert_bitwise(sample, key)
    assert_close(sample, key, 1e-12)


@pytest.mark.parametrize("key", [key for key in SAMPLE if key[2] != "none"], ids=" ".join)
def test_less_is_kept_on_each_rank(sample: list[Found], key: tuple[str, ...]) -> None:
    spare = GATHERED_BYTES if key[1] == "fsdp2" else 0
    for rank in sample:
        assert rank[key]["alive_bytes"] < 0.95 * rank["stack", "ddp", "none"]["alive_bytes"] + spare


def test_a_step_s_budget_counts_what_a_rank_holds(sample: list[Found]) -> None:
    whole = 4 * sum(parameter.nbytes for parameter in build().parameters())  # weights, gradients, AdamW's two
    for rank in sample:
        assert rank["stack", "ddp", "none"]["resident_bytes"] == whole
        assert whole / 2 <= rank["stack", "fsdp2", "none"]["resident_bytes"] < 0.6 * whole


@pytest.mark.slow
@pytest.mark.parametrize("key", MORE, ids=" ".join)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft asks by the old name
def test_other_models_settings_and_orders_are_one_process(more: list[Found], key: tuple[str, ...]) -> None:
    assert_bitwise(more, key)
    if key[0] != "batch norm":  # its statistics are those of each rank's rows
        # Transformers computes norms and routers in float32 whatever the weights are in.
        assert_close(more, key, 1e-12 if key[0] == "stack" else 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("key", MORE, ids=" ".join)
def test_blocks_of_sharded_tensors_say_that_they_are_made_again_as_a_whole(
    more: list[Found], key: tuple[str, ...]
) -> None:
    by_operator = key[2].startswith(("selective", "budget", "auto"))
    sharded = key[1] in ("tensor parallel", "fsdp2 inside the blocks")
    for rank in more:
        said = [message for message in rank[key]["said"] if "recomputed as a whole" in message]
        assert len(said) == (by_operator and sharded)


@pytest.mark.slow
@pytest.mark.parametrize("key", COMPILED, ids=" ".join)
def test_compiled_blocks_on_two_ranks_are_one_process(compiled: list[Found], key: tuple[str, ...]) -> None:
    assert_close(compiled, key, 1e-12)
    for rank in compiled:
        assert (rank[key]["graphs"] > 0) == key[2].startswith("compile")


def test_every_policy_is_here() -> None:
    families = {key[2].partition(":")[0] for key in (*SAMPLE, *COMPILED)}
    assert families >= {"full", "every", "selective", "budget", "auto", "compile", "a class", "a pattern"}
    assert {key[1] for key in SAMPLE} == set(STRATEGIES)
