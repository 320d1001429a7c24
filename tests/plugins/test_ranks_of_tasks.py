"""Two ranks whose rows are of other tasks: a mean over one head's rows is not another head's."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.plugins.ranks_of_tasks import BATCHES
from tests.processes import run_on_ranks

REFUSED = {
    "a, b": ("one on each rank", "miss the whole batch's by 50"),
    "a and b, c": ("2 terms",),
    "a and b, b and c": ("2 terms",),
    "b and c, a and b": ("2 terms",),
}


@pytest.mark.parametrize(
    ("loss", "sizes"),
    [("heads", ["2"]), ("columns", ["2"]), pytest.param("columns", ["1"], marks=pytest.mark.slow)],
)
@pytest.mark.long
def test_ranks_of_other_tasks_take_none_for_another(loss: str, sizes: list[str], tmp_path: Path) -> None:
    """A batch of other tasks on each rank is refused; of the same ones it trains as under DDP alone."""
    path = tmp_path / "found.pt"
    done = run_on_ranks("tests.plugins.ranks_of_tasks", str(path), loss, *sizes, limit=240)
    assert done.returncode == 0, done.stderr[-3000:]
    zero, one = (torch.load(f"{path}.{rank}") for rank in (0, 1))
    for batches in BATCHES:
        (plain, *ours), (_, *others) = zero[batches], one[batches]
        for first, second in zip(ours, others, strict=True):
            if batches in REFUSED:
                assert isinstance(first, str), batches
                assert first.startswith("BudgetError")
                assert any(words in first for words in REFUSED[batches]), first
                assert isinstance(second, str)
            else:
                assert isinstance(first, Tensor), first
                assert torch.equal(first, second)
                torch.testing.assert_close(first, plain, rtol=1e-12, atol=1e-13)
