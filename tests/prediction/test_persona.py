"""What CUDA's choices save and allocate, against what their kernels are known to keep."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_memkit import predict_memory
from lightning_memkit.prediction.contained import contained
from lightning_memkit.prediction.devices import DEVICES, Device, device_named
from lightning_memkit.prediction.simulation import Simulation

MIB = 2**20

GPU = DEVICES["rtx4090"]


def saved_bytes(function, *shapes, dtype=torch.float32, device: Any = GPU) -> Any:
    """What autograd keeps of a function beyond its inputs, with its result."""
    with Simulation(device) as simulation:
        inputs = [torch.empty(shape, dtype=dtype, requires_grad=True) for shape in shapes]
        before = simulation.live_bytes
        out = function(*inputs)
        return simulation.live_bytes - before, out


def test_dropout_keeps_a_boolean_an_element():
    held, _ = saved_bytes(lambda x: F.dropout(x, 0.1), (64, 1000))
    assert held == 64_000 * (4 + 1)
    on_cpu, _ = saved_bytes(lambda x: F.dropout(x, 0.1), (64, 1000), device=None)
    assert on_cpu == 64_000 * (4 + 4)
    module = nn.Dropout(0.1).eval()
    assert saved_bytes(module, (64, 1000))[0] == 0


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_in_16_bits_keeps_no_scores(dropout):
    shape = (2, 4, 512, 64)

    def attention(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)

    held, out = saved_bytes(attention, shape, shape, shape, dtype=torch.bfloat16)
    assert out.shape == shape
    assert held == pytest.approx(out.nbytes + 2 * 4 * 512 * 4, abs=1024)  # the result, and a float32 a row


def test_attention_with_a_mask_keeps_the_mask_and_no_scores():
    shape = (2, 4, 512, 64)

    def attention(q, k, v):
        mask = torch.ones(2, 1, 512, 512, dtype=torch.bool)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    held, out = saved_bytes(attention, shape, shape, shape)
    assert held == pytest.approx(out.nbytes + 2 * 4 * 512 * 4 + 2 * 512 * 512 * 4, abs=1024)


def test_grouped_heads_in_float32_keep_scores():
    def attention(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    held, _ = saved_bytes(attention, (1, 8, 256, 64), (1, 2, 256, 64), (1, 2, 256, 64))
    assert held >= 8 * 256 * 256 * 4


def test_a_width_that_is_no_multiple_of_eight_is_padded():
    shape = (1, 2, 64, 20)
    held, out = saved_bytes(F.scaled_dot_product_attention, shape, shape, shape, dtype=torch.bfloat16)
    assert out.shape == shape
    assert held >= 4 * 2 * 64 * 24 * 2  # padded q, k, v and result


def shapes_of_gradients(function: Any, shape: tuple[int, ...], count: int) -> list[tuple[int, ...]]:
    """After a backward in a fork, as predictions do it: in torch 2.15 no later fork of this process could."""

    def work() -> list[tuple[int, ...]]:
        with Simulation(GPU):
            inputs = [torch.empty(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(count)]
            function(*inputs).float().sum().backward()
            return [tuple(tensor.grad.shape) for tensor in inputs if tensor.grad is not None]

    return contained(work, timeout_s=60)


def test_gradients_flow_through_the_choices():
    def block(q, k, v):
        return F.dropout(F.scaled_dot_product_attention(q, k, v), 0.1)

    shape = (2, 4, 32, 16)
    assert shapes_of_gradients(block, shape, 3) == [shape] * 3


def test_blocks_that_run_again_make_the_same_choices():
    def block(x):
        return F.dropout(F.scaled_dot_product_attention(x, x, x), 0.1)

    shape = (2, 4, 32, 16)
    assert shapes_of_gradients(lambda x: checkpoint(block, x, use_reentrant=False), shape, 1) == [shape]


def test_autocast_keeps_normalizations_in_float32():
    def block(x):
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ x
            return F.layer_norm(y, (64,)), F.softmax(y, -1), y.pow(2)

    assert {out.dtype for out in saved_bytes(block, (64, 64))[1]} == {torch.float32}
    assert torch.bfloat16 in {out.dtype for out in saved_bytes(block, (64, 64), device=None)[1]}


def test_autocast_sums_into_float32_without_a_copy():
    def block(x):
        y = x.bfloat16()
        with torch.autocast("cpu", torch.bfloat16):
            return y, y.sum(0), torch.cumsum(y, 0)

    with Simulation(GPU) as meter:
        x = torch.empty(1024, 1024)
        _, total, sums = block(x)
    assert (total.dtype, sums.dtype) == (torch.float32, torch.float32)
    assert meter.peak_bytes == (4 + 2 + 4) * 2**20 + 4096  # x, y, and the results


@pytest.mark.parametrize(
    ("options", "temporaries"), [({}, 1), ({"foreach": False}, 1.5), ({"fused": True}, 0)]
)
def test_optimizers_step_lists_by_default(options, temporaries):
    model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False))
    weights = 2 * 512 * 512 * 4

    def step(batch):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()

    optimizer = torch.optim.AdamW(model.parameters(), **options)
    found = predict_memory(step, torch.zeros(1, 512), device="rtx4090")
    assert found.phases["optimizer"] / weights == pytest.approx(4 + temporaries, abs=0.3)


def test_the_total_is_what_is_reserved_and_what_lies_beside_it():
    model = nn.Linear(1024, 1024)
    found = predict_memory(
        lambda batch: model(batch).sum().backward(), torch.zeros(8, 1024), device="h100-80gb"
    )
    device = DEVICES["h100-80gb"]
    assert found.device == "h100-80gb"
    assert found.peak_bytes <= found.reserved_bytes
    assert found.reserved_bytes % 2**21 == 0
    assert found.total_bytes == found.reserved_bytes + device.context_bytes
    assert "on h100-80gb" in str(found)
    assert "Reserved" in str(found)


@pytest.mark.parametrize(("name", "workspace"), [("h200", 32 * MIB), ("rtx4090", 8_320 * 1024)])
def test_the_matrix_library_has_a_workspace_for_the_forward_and_one_for_the_backward(name, workspace):
    model = nn.Linear(1024, 1024)
    scale = torch.ones(64, requires_grad=True)

    def forward(batch):
        with torch.no_grad():
            model(batch)

    batch = torch.zeros(8, 1024)
    one, two = (
        predict_memory(step, batch, device=name)
        for step in (forward, lambda batch: model(batch).sum().backward())
    )
    none = predict_memory(lambda batch: (scale * 2).sum().backward(), torch.zeros(8), device=name)
    assert [found.library_bytes for found in (none, one, two)] == [0, workspace, 2 * workspace]
    for found in (none, one, two):  # handed out, in units of 512 bytes, and reserved
        assert 0 <= found.allocated_bytes - found.library_bytes - found.peak_bytes < 10 * 512
        assert found.reserved_bytes >= found.allocated_bytes
        assert found.total_bytes == found.reserved_bytes + DEVICES[name].context_bytes


def test_devices_are_known_by_name_or_described():
    assert device_named("RTX4090") is GPU
    assert device_named("rtx4090", "20GiB").memory_bytes == 20 * 2**30
    own = Device(name="own", memory_bytes=2**34, flops_16=1e14, flops_32=1e13, bytes_per_second=5e11)
    assert device_named(own) is own
    assert own.usable_bytes == 2**34 - own.context_bytes
    with pytest.raises(ValueError, match=r"device='rtx9090' is unknown; .*Device\(name="):
        device_named("rtx9090")
    with pytest.raises(ValueError, match="flops_16=0 of device 'own' is not positive"):
        Device(name="own", memory_bytes=2**34, flops_16=0, flops_32=1e13, bytes_per_second=5e11)
    with pytest.raises(ValueError, match="leaves nothing of its"):
        Device(name="own", memory_bytes=2**28, flops_16=1, flops_32=1, bytes_per_second=1)


HOPPER = DEVICES["h200"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("affine", [True, False])
def test_an_rms_norm_keeps_a_number_a_row(dtype, affine):
    """One kernel on CUDA; on the CPU it is made of others, which keep the input in float32 and its product."""

    def norm(x, weight):
        return F.rms_norm(x, (64,), weight if affine else None)

    held, out = saved_bytes(norm, (512, 64), (64,), dtype=dtype)
    assert out.dtype == dtype
    assert held - out.nbytes <= 2 * 512 * 4
    if affine or dtype is torch.bfloat16:
        assert saved_bytes(norm, (512, 64), (64,), dtype=dtype, device=None)[0] - out.nbytes >= 512 * 64 * 4


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_an_rms_norm_of_mixed_dtypes_is_none_of_one_kernel():
    held, out = saved_bytes(
        lambda x: F.rms_norm(x, (64,), torch.ones(64, requires_grad=True)), (512, 64), dtype=torch.bfloat16
    )
    assert held - out.nbytes >= 512 * 64 * 4


def test_a_log_sigmoid_keeps_no_buffer():
    assert saved_bytes(F.logsigmoid, (64, 1000))[0] == 64_000 * 4
    assert saved_bytes(F.logsigmoid, (64, 1000), device=None)[0] == 2 * 64_000 * 4


def test_attention_modules_take_the_same_kernels():
    """`MultiheadAttention` calls them within a function that a mode sees as one."""
    width, length, heads = 64, 512, 4

    def attention(module, x):
        return module(x, x, x, need_weights=False)[0]

    with Simulation(GPU) as simulation:
        module = nn.MultiheadAttention(width, heads, dropout=0.1, batch_first=True)
        x = torch.empty(2, length, width, requires_grad=True)
        before = simulation.live_bytes
        out = attention(module, x)
        held = simulation.live_bytes - before
    assert held < 2 * heads * length * length * 4  # the scores alone
    assert out.shape == x.shape


@pytest.mark.parametrize("mask", [None, "bool", "float"])
@pytest.mark.parametrize(("key_heads", "value_width"), [(8, 64), (2, 64), (8, 32)])
def test_on_hopper_cudnn_s_kernel_keeps_no_scores(mask, key_heads, value_width):
    """Seen on an H200: in 16 bits it is first with grouped heads and a mask, too, where others store all scores."""
    length = 512

    def attention(q, k, v):
        given = None
        if mask is not None:
            given = torch.ones(2, 1, length, length, dtype=torch.bool if mask == "bool" else q.dtype)
        return F.scaled_dot_product_attention(q, k, v, given, enable_gqa=key_heads != 8)

    shapes = (2, 8, length, 64), (2, key_heads, length, 64), (2, key_heads, length, value_width)
    held, out = saved_bytes(attention, *shapes, dtype=torch.bfloat16, device=HOPPER)
    masks = 0 if mask is None else 2 * length * length * 2  # in the kernel's dtype, as large as it was given
    assert held <= out.nbytes + 2 * 8 * length * 4 + masks + (masks // 2 if mask == "bool" else 0) + 1024


def test_padding_is_not_cast_under_autocast():
    def padded(x):
        with torch.autocast("cpu", torch.bfloat16):
            return F.pad((x @ x)[None], (1, 1), mode="reflect")

    assert saved_bytes(padded, (64, 64))[1].dtype == torch.bfloat16
    assert saved_bytes(padded, (64, 64), device=None)[1].dtype == torch.float32
