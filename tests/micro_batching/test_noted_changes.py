"""What a step sets once is told from what it changes every time, also where one row was tried before several."""

import pytest
import torch
from torch import Tensor, nn

from lightning_memkit.micro_batching import split_batch
from lightning_memkit.micro_batching.proof.trials import Trials
from lightning_memkit.micro_batching.run import Run, Step


class Cached(nn.Linear):
    """Builds a mask in its first forward."""

    mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(5)
        return super().forward(x * self.mask)


@pytest.mark.parametrize("sizes", [[1, 3], [1, 2, 1], [1, 1, 2], [4]])
def test_a_mask_that_one_row_has_shown_is_judged_by_more_rows(sizes):
    net = Cached(5, 2)
    run = Run(net, [torch.optim.SGD(net.parameters(), 0.1)])
    trials = Trials(run)
    batch = {"x": torch.randn(4, 5)}
    step = Step(run, batch, lambda rows: net(rows["x"]).square().mean(), batch_idx=0)
    run.loader_batch_size = 4
    for part in split_batch(batch, sizes):
        assert trials.peak_of(step, part, [], None)
        assert net.mask is None
    assert trials.changes == ()
    assert trials.watch.once == {"mask"}


class Counted(nn.Linear):
    """Counts its steps."""

    steps: int = 0


def test_a_counter_is_a_change_of_every_step_on_any_number_of_rows():
    net = Counted(5, 2)

    def loss(rows: dict[str, Tensor]) -> Tensor:
        net.steps += 1
        return net(rows["x"]).square().mean()

    run = Run(net, [torch.optim.SGD(net.parameters(), 0.1)])
    trials = Trials(run)
    batch = {"x": torch.randn(4, 5)}
    step = Step(run, batch, loss, batch_idx=0)
    for part in (*split_batch(batch, [1, 3]), batch):
        trials.peak_of(step, part, [], None)
        assert [change.name for change in trials.changes] == ["steps"]
    assert net.steps == 0
