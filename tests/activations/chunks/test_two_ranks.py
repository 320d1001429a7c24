"""Ranks whose modules run in chunks, with negatives of all ranks: one process with the whole batch."""

from typing import Any

import pytest
import torch

from tests.activations.chunks.two_ranks import CASES, alone
from tests.processes import run_on_ranks, selected


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("chunks") / "found.pt"
    cases = selected(request, "case")
    done = run_on_ranks("tests.activations.chunks.two_ranks", str(path), *cases, ranks=request.param)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(path)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.long
def test_negatives_of_all_ranks_are_those_of_the_whole_batch(ranks: Any, case: str) -> None:
    weights = ranks[case]
    for name, value in alone().items():
        assert float((weights[name] - value).abs().max()) <= 1e-12, name
