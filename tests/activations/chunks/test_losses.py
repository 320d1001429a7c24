"""Any loss over a batch, its modules in chunks: what the unchunked step gives."""

import pytest
import torch
from torch.nn import functional as F

from lightning_memkit.activations.chunks.checkpoint_chunks import checkpoint_chunks
from tests.activations.chunks.losses import LOSSES, Pair, batches, train


def in_chunks(rows: int, net: Pair) -> None:
    for module in (net.first, net.second, net.teacher, net.router):
        checkpoint_chunks(module, rows=rows)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.long
def test_any_loss_trains_as_without_chunks(name: str, rows: int) -> None:
    for dtype, allowed in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
        plain = train(name, dtype, lambda net: None)
        chunked = train(name, dtype, lambda net: in_chunks(rows, net))
        assert chunked.losses == pytest.approx(plain.losses, rel=1e3 * allowed)
        for key, value in plain.weights.items():
            assert float((chunked.weights[key] - value).abs().max()) <= allowed, key
        assert len(set(plain.losses)) > 10


def test_a_mean_over_chunks_would_be_another_loss() -> None:
    """What the tests above would show if the loss were taken chunk by chunk."""
    torch.manual_seed(2)
    net = Pair().double()
    batch = next(batches(1, torch.float64))
    whole = LOSSES["clip"](net, batch)
    halves = [
        LOSSES["clip"](net, {key: value[part] for key, value in batch.items()})
        for part in (slice(5), slice(5, 10))
    ]
    assert not F.mse_loss(whole, torch.stack(halves).mean()) < 1e-3
