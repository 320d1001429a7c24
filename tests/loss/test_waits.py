"""How often the host waits for the device in a loss: on a device that counts what crosses over, both ways.

Each number that is read, and each copy from pageable memory, waits until the device has done all that was launched.
"""

# pyright: reportOptionalMemberAccess=false, reportArgumentType=false
import pytest
import torch

from lightning_memkit.loss import linear_cross_entropy, use_chunked_loss
from tests.testing.fake_device import fake_device
from tests.testing.needs import NEEDS_COMPILER

REDUCTIONS = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "count": {"count": 50},
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def problem(ignored: int, dtype: torch.dtype = torch.float32):
    hidden, weight, labels = torch.randn(64, 32), torch.randn(500, 32), torch.randint(500, (64,))
    labels[:ignored] = -100
    return hidden.to(dtype), weight.to(dtype), labels


def results(tensors, **options) -> list[torch.Tensor]:
    """The loss, and the gradients of its sum."""
    hidden, weight, labels = tensors
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, labels, chunk_bytes=16384, label_smoothing=0.1, **options)
    loss.sum().backward()
    return [loss.detach(), hidden.grad, weight.grad]


@NEEDS_COMPILER
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", REDUCTIONS.values(), ids=REDUCTIONS)
@pytest.mark.parametrize("ignored", [0, 4, 64])
@pytest.mark.parametrize("skips", [True, False])
def test_a_call_waits_once_and_not_at_all_where_ignored_tokens_are_computed(dtype, options, ignored, skips):
    given = problem(ignored, dtype)
    with fake_device() as device:
        there = [tensor.to(device.torch_device) for tensor in given]
        device.reset_counts()
        ours = results(there, skip_ignored=skips, **options)
        found = device.transfers
        ours = [value.cpu() for value in ours]
    assert (found.to_device_copies, found.to_host_copies) == (0, int(skips))
    here = results([given[0].detach(), given[1].detach(), given[2]], **options)
    for value, true in zip(ours, here, strict=True):
        torch.testing.assert_close(value, true, equal_nan=True)


@NEEDS_COMPILER
@pytest.mark.parametrize("skips", [True, False])
def test_a_chunked_loss_waits_as_its_option_says(skips):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 40))
    x, labels = torch.randn(12, 8), torch.tensor([-100, *range(11)])
    truth = torch.nn.functional.cross_entropy(net(x), labels)
    undo = use_chunked_loss(net, heads=["1"], skip_ignored=skips)
    with fake_device() as device:
        there = device.torch_device
        net.to(there)
        given = x.to(there), labels.to(there)
        device.reset_counts()
        loss = torch.nn.functional.cross_entropy(net(given[0]), given[1])
        loss.backward()
        found = device.transfers
        torch.testing.assert_close(loss.detach().cpu(), truth)
        undo()
        net.cpu()
    assert (found.to_device_copies, found.to_host_copies) == (0, int(skips))


def test_on_a_cpu_a_label_out_of_bounds_is_named_in_either_case():
    hidden, weight, labels = problem(0)
    labels[3] = 500
    for skips in (True, False):
        with pytest.raises(IndexError, match="Label 500 is out of bounds"):
            linear_cross_entropy(hidden, weight, labels, skip_ignored=skips)


@pytest.mark.parametrize("backend", ["torch", "liger", "cut_cross_entropy"])
def test_kernels_that_skip_by_themselves_are_refused(backend):
    hidden, weight, labels = problem(0)
    with pytest.raises(ValueError, match="this kernel decides by itself"):
        linear_cross_entropy(hidden, weight, labels, backend=backend, skip_ignored=False)
    with pytest.raises(ValueError, match="this kernel decides by itself"):
        use_chunked_loss(torch.nn.Linear(2, 2), heads=[""], backend=backend, skip_ignored=False)
