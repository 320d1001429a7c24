"""Perplexity from losses against torchmetrics' own from logits."""

import pytest
import torch
from torch.nn import functional as F
from torchmetrics.text import Perplexity

from lightning_memkit.plugins.perplexity import LossPerplexity


@pytest.mark.parametrize("summed", [False, True])
def test_it_is_torchmetrics_from_logits(summed):
    ours, usual = LossPerplexity(), Perplexity(ignore_index=-100)
    for ignored in (0, 3, 8):  # batches of unlike weight, the last one without any label
        logits, labels = torch.randn(1, 8, 20), torch.randint(20, (1, 8))
        labels[:, :ignored] = -100
        usual.update(logits, labels)
        tokens = (labels != -100).sum()
        reduction = "sum" if summed else "mean"
        loss = F.cross_entropy(logits[0], labels[0], reduction=reduction)
        ours.update(loss, tokens, summed=summed)
    torch.testing.assert_close(ours.compute(), usual.compute())


def test_it_holds_no_graph_and_starts_again():
    metric = LossPerplexity()
    metric.update(torch.tensor(2.0, requires_grad=True), 5)
    assert not metric.loss.requires_grad
    assert metric.compute() == torch.tensor(2.0).exp()
    metric.reset()
    assert metric.tokens == 0


def test_states_add_up_over_ranks():
    one, other = LossPerplexity(), LossPerplexity()
    one.update(torch.tensor(1.0), 3)
    other.update(torch.tensor(4.0), 1)
    one._reduce_states(other.metric_state)
    torch.testing.assert_close(one.compute(), torch.tensor((3 * 1.0 + 4.0) / 4).exp())
