from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.plugins.toys import trained, weights
from tests.plugins.two_ranks import ROWS, STEPS, TAGGERS
from tests.processes import Ran, run_on_ranks, selected

KEPT_FROM_LESS = "as if it were clamped for all rows"
KEPT = ["penalized", "epsilon", "detector"]
SPLIT = [loss for loss in TAGGERS if loss not in ("ragged", "contrastive", "absent", "averaged", *KEPT)]


def run_on_two_ranks(path: Path, size: int, strategy: str, *losses: str) -> Ran:
    return run_on_ranks("tests.plugins.two_ranks", str(path), str(size), strategy, *losses)


@pytest.fixture(scope="module", params=["ddp", "fsdp2"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One launch for all losses of a strategy that are asked for."""
    path = tmp_path_factory.mktemp(request.param) / "found.pt"
    # FSDP2's ranks wait for one whose step returns None, as they do without memkit.
    absent = ["absent"] if request.param == "ddp" else []
    done = run_on_two_ranks(path, 3, request.param, *selected(request, "loss"), *absent)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(path)


def difference(ranks: dict[str, torch.Tensor], loss: str) -> float:
    data = DataLoader(TAGGERS[loss].rows(STEPS * ROWS), ROWS)  # pyright: ignore[reportArgumentType]
    whole, _ = trained(dtype=torch.float64, max_steps=STEPS, data=data, module=TAGGERS[loss])
    return float((ranks["weights"] - weights(whole)).abs().max())


@pytest.mark.parametrize("loss", SPLIT)
@pytest.mark.long
def test_parts_weigh_over_all_ranks(found: dict[str, Any], loss: str) -> None:
    """Two gloo ranks in parts are one process with the whole batch, by what each loss shows or a comparison finds.

    Also from the step on at which it is divided by another number than before, or has more terms on one rank.
    """
    assert float(found[loss]["spread"]) == 0
    assert difference(found[loss], loss) <= 1e-12


@pytest.mark.parametrize("size", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_divisor_that_is_kept_from_zero_is_that_of_both_ranks_rows(tmp_path: Path, size: int) -> None:
    """Where a rank has none of what is counted its divisor of 1 was taken for one, unsaid; penalties were refused."""
    path = tmp_path / "found.pt"
    done = run_on_two_ranks(path, size, "ddp", *KEPT)
    assert done.returncode == 0, done.stderr[-3000:]
    found = torch.load(path)
    assert {loss: difference(found[loss], loss) <= 1e-12 for loss in KEPT} == dict.fromkeys(KEPT, True)
    assert not any(KEPT_FROM_LESS in text for loss in KEPT for text in found[loss]["warned"])


def test_a_mean_of_a_mask_that_is_clamped_in_all_rows_of_one_rank_is_warned_of(tmp_path: Path) -> None:
    """A rank's divisor is then no count that could be added to the other's; nothing was said."""
    done = run_on_two_ranks(tmp_path / "found.pt", 2, "ddp", "averaged")
    assert done.returncode == 0, done.stderr[-3000:]
    found = torch.load(tmp_path / "found.pt")["averaged"]
    assert sum(KEPT_FROM_LESS in text for text in found["warned"]) == 1
    assert difference(found, "averaged") >= 1e-6


@pytest.mark.parametrize("found", ["ddp"], indirect=True)
def test_a_rank_that_passes_over_a_batch_leaves_the_others_no_trial_to_wait_in(found: dict[str, Any]) -> None:
    assert float(found["absent"]["spread"]) == 0


def test_plain_ddp_weighs_ranks_alike(tmp_path: Path) -> None:
    """The control: without memkit it is no mean over what all ranks hold."""
    path = tmp_path / "found.pt"
    done = run_on_two_ranks(path, 0, "ddp", "plain")
    assert done.returncode == 0, done.stderr[-3000:]
    assert difference(torch.load(path)["plain"], "plain") >= 1e-3


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_a_loss_that_has_other_terms_in_some_parts_of_one_rank_ends_both_with_a_reason(
    tmp_path: Path, strategy: str
) -> None:
    done = run_on_two_ranks(tmp_path / "found.pt", 3, strategy, "ragged")
    assert done.returncode != 0
    assert done.stderr.count("BudgetError: ") == 2
    assert done.stderr.count("keep the batch whole (micro_batch_size = the loader's batch size") == 2


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp2"])
def test_rows_that_act_on_each_other_are_refused_on_both_ranks(tmp_path: Path, strategy: str) -> None:
    done = run_on_two_ranks(tmp_path / "found.pt", 3, strategy, "contrastive")
    assert done.returncode != 0
    assert done.stderr.count("BudgetError: ") == 2
