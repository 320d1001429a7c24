"""The device without hardware: it computes like the CPU, counts every byte and copy, and runs out of memory."""

import copy
import gc
import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.testing.fake_device import fake_device
from tests.testing.needs import NEEDS_COMPILER

pytestmark = NEEDS_COMPILER

FAKE = "fake"
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True, scope="module")
def no_leftovers():
    """What earlier tests left in cycles, a Trainer and its parts, is not these tests'."""
    gc.collect()


def transformer():
    return nn.Sequential(
        nn.Embedding(10, 16),
        nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True),
        nn.RMSNorm(16),
        nn.Linear(16, 10),
    )


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.ConvTranspose2d(8, 8, 2, groups=4),
        nn.GroupNorm(2, 8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    )


def one_step(model, optimizer, device, seed):
    generator = torch.Generator().manual_seed(seed)
    shape = (4, 8) if isinstance(model[0], nn.Embedding) else (4, 1, 8, 8)
    batch = torch.randint(0, 10, shape, generator=generator)
    inputs = batch if isinstance(model[0], nn.Embedding) else batch.float()
    targets = batch.flatten(1)[:, : 8 if isinstance(model[0], nn.Embedding) else 1]
    loss = F.cross_entropy(model(inputs.to(device)).flatten(0, -2), targets.flatten().to(device))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return loss.item()


def trained(make, device, steps=3, **options):
    torch.manual_seed(0)
    model = make().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    losses = [one_step(model, optimizer, device, seed) for seed in range(steps)]
    return losses, {name: value.cpu() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("make", [transformer, cnn])
def test_training_is_bitwise_the_cpus(make, options):
    losses, weights = trained(make, "cpu", **options)
    with fake_device() as device:
        fake_losses, fake_weights = trained(make, FAKE, **options)
        assert device.live_bytes == 0
    assert fake_losses == losses
    assert all(torch.equal(fake_weights[name], value) for name, value in weights.items())


def error_of_one_step(model, optimizer):
    """The message alone: an error that is kept keeps the tensors of its traceback's frames."""
    try:
        one_step(model, optimizer, FAKE, 1)
    except torch.OutOfMemoryError as error:
        return str(error)
    return "none"


def test_live_and_peak_bytes_are_those_asked_for():
    with fake_device() as device:
        assert (device.live_bytes, device.peak_bytes, device.allocations) == (0, 0, 0)
        x = torch.empty(1000, device=FAKE)
        y = torch.empty(10, 10, dtype=torch.bfloat16, device=FAKE)
        assert device.live_bytes == device.peak_bytes == 4200
        view = x[10:].view(torch.int32).unfold(0, 2, 1).t()
        assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        del x
        assert device.live_bytes == 4200  # the view holds the memory
        del view
        z = y + y
        assert (device.live_bytes, device.peak_bytes) == (400, 4200)
        device.reset_peak()
        del z
        assert (device.live_bytes, device.peak_bytes, device.allocations) == (200, 400, 3)
        storage = torch.UntypedStorage(8, device=FAKE)
        storage.resize_(100)
        assert device.live_bytes == 300
        assert torch.fake.memory_allocated() == 300  # pyright: ignore[reportAttributeAccessIssue]
        torch.accelerator.empty_cache()  # there is none
        assert torch.accelerator.memory_allocated() == torch.accelerator.memory_reserved() == 300
        assert torch.accelerator.max_memory_allocated() == device.peak_bytes > 300
        torch.accelerator.reset_peak_memory_stats()
        assert device.peak_bytes == 300


def test_copies_count_and_operators_do_not():
    with fake_device() as device:
        x = torch.arange(6.0).to(FAKE)  # 24 bytes
        y = (x @ x + torch.ones(6, device=FAKE)).exp()
        assert device.transfers.to_device_copies == 1
        assert device.transfers.to_device_bytes == 24
        assert device.transfers.to_host_copies == 0
        assert y.cpu().equal((torch.arange(6.0) @ torch.arange(6.0) + torch.ones(6)).exp())
        x.copy_(torch.ones(1, dtype=torch.float64))  # 8 bytes cross, whatever they are expanded to
        host = torch.empty(6, dtype=torch.bfloat16).copy_(x[::2].repeat(2))
        assert host.eq(1).all()
        assert device.transfers.to_device_bytes == 32
        assert device.transfers.to_host_bytes == 24 + 24
        assert device.transfers.to_host_copies == 2
        device.reset_counts()
        assert device.transfers.to_host_bytes == device.allocations == 0


def test_the_budget_is_met_to_the_byte():
    with fake_device() as device:
        trained(transformer, FAKE)
        needed = device.peak_bytes
        device.set_limits(budget_bytes=needed)
        trained(transformer, FAKE)
        device.set_limits(budget_bytes=needed - 1)
        with pytest.raises(torch.OutOfMemoryError, match=rf"budget of {needed - 1} bytes"):
            trained(transformer, FAKE)
        assert device.live_bytes == 0
    with fake_device() as device:
        trained(transformer, FAKE)  # the limits ended with their context


def test_every_allocation_of_a_step_can_fail_and_none_leaks():
    with fake_device() as device:
        model = transformer().to(FAKE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        one_step(model, optimizer, FAKE, 0)
        optimizer.zero_grad()
        before = device.live_bytes
        device.reset_counts()
        one_step(model, optimizer, FAKE, 1)
        points = device.allocations
        assert points > 100
        for point in range(points):
            optimizer.zero_grad()
            device.reset_counts()
            device.set_limits(fail_at=point)
            assert f"Allocation {point} " in error_of_one_step(model, optimizer)
            device.set_limits()
            optimizer.zero_grad()
            device.synchronize()
            assert device.live_bytes == before


def test_an_error_in_the_backward_comes_from_the_devices_own_thread():
    with fake_device() as device:
        x = torch.randn(100, device=FAKE, requires_grad=True)
        loss = (x.exp() * x.sin()).sum()
        device.set_limits(budget_bytes=device.live_bytes)
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward()
        device.set_limits()
        loss = (x.exp() * x.sin()).sum()
        loss.backward()
        assert x.grad is not None


def test_pinned_host_memory_is_counted():
    with fake_device() as device:
        x, y = torch.empty(10, pin_memory=True), torch.randn(4).pin_memory()
        assert x.is_pinned()
        assert y.is_pinned()
        assert not torch.empty(10).is_pinned()
        assert device.pinned_bytes == 64 + 16
        assert device.live_bytes == 0
        del x
        assert (device.pinned_bytes, device.pinned_peak_bytes) == (16, 80)


def test_pinned_host_memory_is_kept_until_it_is_asked_back():
    with fake_device() as device:
        x = torch.empty(1000, dtype=torch.uint8, pin_memory=True)
        address = x.data_ptr()
        del x
        assert (device.pinned_bytes, device.pinned_reserved_bytes) == (0, 1024)
        again, other = (torch.empty(1000, dtype=torch.uint8, pin_memory=True) for _ in range(2))
        assert address in (again.data_ptr(), other.data_ptr())
        assert device.pinned_reserved_bytes == 2048
        del again
        torch.accelerator.empty_host_cache()
        assert (device.pinned_reserved_bytes, device.pinned_reserved_peak_bytes) == (1024, 2048)
        assert other.is_pinned()


def test_copies_on_a_stream_happen_when_they_are_waited_for():
    with fake_device() as device:
        stream, host = torch.Stream(device.torch_device), torch.ones(10).pin_memory()
        x = torch.zeros(10, device=FAKE)
        with stream:
            x.copy_(host, non_blocking=True)
            event = stream.record_event()
        assert x.sum().item() == 0
        assert not event.query()
        torch.accelerator.current_stream(device.torch_device).wait_event(event)
        assert x.sum().item() == 10
        assert event.query()
        with stream:
            host.copy_(x * 2, non_blocking=True)
        assert device.hazards == 1  # the product is gone, and the copy still had to read it
        with stream:
            host.copy_(x, non_blocking=True)
        x.zero_()
        stream.synchronize()
        assert host.sum().item() == 0  # x was overwritten before the copy came to it
        with stream:
            x.copy_(torch.ones(10), non_blocking=True)  # not pinned: at once
        assert x.sum().item() == 10


def test_random_numbers_follow_the_cpus_seed_and_own_generators():
    with fake_device():
        torch.manual_seed(3)
        expected = torch.randn(5), torch.rand(5)
        torch.manual_seed(3)
        assert torch.equal(torch.randn(5, device=FAKE).cpu(), expected[0])
        assert torch.equal(torch.rand(5, device=FAKE).cpu(), expected[1])
        generator, cpu_generator = torch.Generator(FAKE).manual_seed(7), torch.Generator().manual_seed(7)
        x = torch.empty(5, dtype=torch.int32, device=FAKE).random_(0, 100, generator=generator)
        assert torch.equal(
            x.cpu(), torch.empty(5, dtype=torch.int32).random_(0, 100, generator=cpu_generator)
        )
        state = generator.get_state()
        first = torch.randn(5, device=FAKE, generator=generator)
        generator.set_state(state)
        assert torch.equal(first.cpu(), torch.randn(5, device=FAKE, generator=generator).cpu())


def test_activation_checkpointing_replays_dropout():
    with fake_device() as device:
        results = []
        for recompute in (False, True):
            torch.manual_seed(0)
            x = torch.randn(1000, device=FAKE, requires_grad=True)

            def function(x):
                return F.dropout(x.sin().exp().cos(), 0.5)

            device.reset_peak()
            y = checkpoint(function, x, use_reentrant=False) if recompute else function(x)
            alive = device.live_bytes
            y.sum().backward()  # pyright: ignore[reportOptionalMemberAccess]
            assert x.grad is not None
            results.append((x.grad.cpu(), alive))
        assert torch.equal(results[0][0], results[1][0])
        assert results[1][1] < results[0][1]


def test_tensors_are_saved_loaded_and_copied():
    with fake_device() as device:
        x = torch.randn(3, 4, device=FAKE).t()
        file = io.BytesIO()
        torch.save(x, file)
        for place in (FAKE, "cpu"):
            file.seek(0)
            loaded = torch.load(file, map_location=place)
            assert loaded.device.type == place
            assert torch.equal(loaded.cpu(), x.cpu())
        assert copy.deepcopy(x).device == device.torch_device == x.device


def test_a_negative_limit_is_refused():
    with fake_device() as device, pytest.raises(ValueError, match="budget_bytes=-1 is below zero"):
        device.set_limits(budget_bytes=-1)


def run(code, **environment):
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT
    )
    return result.returncode, result.stdout + result.stderr


def test_without_a_compiler_the_error_says_what_to_install(tmp_path):
    code = "from tests.testing.fake_device import fake_device\nwith fake_device(): pass"
    status, text = run(code, XDG_CACHE_HOME=str(tmp_path), CXX=str(tmp_path / "none"))
    assert status == 1
    assert "RuntimeError: The device 'fake' is compiled on first use, and no C++ compiler is found" in text


def test_another_custom_device_is_refused(tmp_path):
    code = (
        "import torch\ntorch.utils.rename_privateuse1_backend('npu')\n"
        "from tests.testing.fake_device import fake_device\nwith fake_device(): pass"
    )
    status, text = run(code, XDG_CACHE_HOME=str(tmp_path))
    assert status == 1
    assert "This process has the custom device 'npu'" in text


def test_the_package_neither_imports_nor_builds_it():
    code = (
        "import sys, lightning_memkit, torch\nfrom lightning_memkit import compensate\n"
        "assert 'lightning_memkit.testing' not in sys.modules\n"
        "assert torch._C._get_privateuse1_backend_name() == 'privateuseone'"
    )
    assert run(code)[0] == 0
