"""How often the host waits for the device in packed attention: at most once a batch, for where documents begin."""

import pytest
import torch
from torch import Tensor

from lightning_memkit import packed_attention
from lightning_memkit.attention import flex
from lightning_memkit.attention.documents import Documents
from tests.testing.fake_device import fake_device
from tests.testing.needs import NEEDS_COMPILER

pytestmark = NEEDS_COMPILER
LAYERS = 3


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("backend", ["auto", "loop"])
def test_all_layers_of_a_batch_wait_once(backend, window):
    with fake_device() as device:
        there = device.torch_device
        query = torch.randn(1, 2, 512, 16).to(there).requires_grad_()
        bounds = torch.tensor([0, 100, 300, 512], dtype=torch.int32).to(there)
        device.reset_counts()
        for _ in range(LAYERS):
            packed_attention(query, query, query, bounds, window=window, backend=backend).sum().backward()
        assert device.waits == 1


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 64])
def test_a_block_mask_and_a_softcap_wait_once(causal, window):
    """Its tables go there from pinned memory, its numbers are filled in there."""
    bounds = torch.tensor([0, 100, 300, 512], dtype=torch.int32)
    query = torch.randn(1, 2, 512, 16)
    here = flex._made(Documents(cu_seqlens=bounds, causal=causal, window=window), query)
    with fake_device() as device:
        there = bounds.to(device.torch_device)
        documents = Documents(cu_seqlens=there, causal=causal, window=window, softcap=30.0)
        query = query.to(device.torch_device)
        device.reset_counts()
        made = flex._made(documents, query)
        change = flex._score_change(documents, query.device)
        assert device.waits == 1
        for name in ("kv", "full_kv", "q", "full_q"):
            assert_same_blocks(made, here, name)
        score = torch.full((), 45.0).to(device.torch_device)
        torch.testing.assert_close(
            change(score, None, None, None, None).cpu(), 30 * torch.tanh(torch.tensor(1.5))
        )


def assert_same_blocks(made: object, here: object, name: str) -> None:
    """The same counts, and the same places as far as these reach; on a CPU their tables are wider."""
    counts: Tensor = getattr(made, f"{name}_num_blocks").cpu()
    assert torch.equal(counts, getattr(here, f"{name}_num_blocks"))
    ours, theirs = getattr(made, f"{name}_indices").cpu(), getattr(here, f"{name}_indices")
    for row, count in enumerate(counts.flatten().tolist()):
        assert torch.equal(ours[0, 0, row, :count], theirs[0, 0, row, :count])
