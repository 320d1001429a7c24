from typing import Any

import pytest

from tests.distributed.launch import two_ranks
from tests.distributed.two_ranks_chunked_loss import CASES


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return two_ranks("two_ranks_chunked_loss", tmp_path_factory.mktemp("chunked_loss"))


@pytest.mark.parametrize("case", CASES[:-1])
def test_two_ranks_are_one_process_without_lazy_logits(found: dict[str, Any], case: str) -> None:
    assert found[case] < 1e-6


def test_a_head_that_is_sharded_again_too_early_is_refused(found: dict[str, Any]) -> None:
    assert "reshard_after_forward=False" in found["head apart"]
