"""Steps on an accelerator that run out of memory at any of its allocations, states at home or in host memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_memkit.optim.journal import journal_steps
from lightning_memkit.optim.state_home import tensors_of
from lightning_memkit.testing import Faults, count_allocations, sweep
from tests.optim.test_offload import build, on_cpu, set_gradients, two_groups
from tests.testing.fake_device import fake_device
from tests.testing.needs import NEEDS_COMPILER

pytestmark = [NEEDS_COMPILER, pytest.mark.usefixtures("short_rows")]

BUNDLE = 6000
PLAIN = None
EXACT = {"mode": "split", "states": "exact"}
COMPACT = {"mode": "kahan", "states": "compact"}
EIGHT_BIT = {"mode": "split24", "states": "8-bit"}
COLD, WARM = 0, 2


def training(
    name: str, compensation: Any, faulty_step: int, *, offload: bool, journaled: bool = True
) -> Callable[[Faults], list[Tensor]]:
    def run(faults: Faults) -> list[Tensor]:
        shown, optimizer, scheduler = build(name, compensation, offload=offload)
        if journaled:
            journal_steps(optimizer, bundle_bytes=BUNDLE)
        for seed in range(4):
            set_gradients(shown, seed)
            if seed == faulty_step:
                faults.arm()
            optimizer.step()
            faults.disarm()
            scheduler.step()
        at_home = [t.device.type for state in optimizer.state.values() for t in tensors_of(state)]
        assert set(at_home) == {"cpu" if offload else "fake"}
        return on_cpu(optimizer)

    return run


@pytest.mark.sampled(6)
@pytest.mark.parametrize("faulty_step", [COLD, WARM], ids=["cold", "warm"])
@pytest.mark.parametrize("offload", [False, True], ids=["at home", "offloaded"])
@pytest.mark.parametrize(
    "compensation", [PLAIN, EXACT, COMPACT, EIGHT_BIT], ids=["plain", "exact", "kahan", "8-bit"]
)
@pytest.mark.parametrize("name", ["AdamW-single", "AdamW-foreach"])
def test_every_fault_of_the_allocator_leaves_no_trace(
    name: str, compensation: Any, offload: bool, faulty_step: int
) -> None:
    with fake_device() as device:
        none = count_allocations(on=device, armed=False)
        with none:
            stock = training(name, compensation, faulty_step, offload=offload, journaled=False)(none)
        points = 0
        run = training(name, compensation, faulty_step, offload=offload)
        every = 2 if compensation is None else 7
        for outcome in sweep(run, on=device, armed=False, points=lambda count: range(1, count, every)):
            assert outcome.recovered, (outcome.fault, outcome.error)
            assert outcome.result is not None
            assert all(torch.equal(*pair) for pair in zip(outcome.result, stock, strict=True))
            assert outcome.leaked_bytes == 0
            points += 1
        assert points
        assert device.hazards == 0


def test_a_step_fits_a_budget_that_its_temporaries_exceed() -> None:
    parameters = [torch.nn.Parameter(torch.randn(64, 64, device="cpu")) for _ in range(8)]
    with fake_device() as device:
        results = []
        for journaled in (False, True):
            shown = [torch.nn.Parameter(parameter.detach().to("fake")) for parameter in parameters]
            optimizer = torch.optim.AdamW(two_groups(shown), foreach=True)
            if journaled:
                journal = journal_steps(optimizer)
            set_gradients(shown, 0)
            states = 2 * sum(parameter.nbytes for parameter in shown)
            if journaled:  # 64 KiB beside the states; the temporaries of all parameters take 128
                device.set_limits(budget_bytes=device.live_bytes + states + (64 << 10))
            optimizer.step()
            device.set_limits()
            results.append(on_cpu(optimizer))
            del optimizer, shown
        assert journal.recovered > 0
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("foreach", [False, True], ids=["for-loop", "foreach"])
def test_a_step_of_one_large_parameter_takes_a_bundle_and_its_temporaries(foreach: bool) -> None:
    weight, bundle_bytes = torch.randn(256, 1024), 128 << 10
    results = []
    for device_type in ("cpu", "fake"):
        with fake_device() as device:
            parameter = torch.nn.Parameter(weight.to(device_type, copy=True))
            optimizer = torch.optim.AdamW([parameter], lr=1e-2, foreach=foreach)
            journal = journal_steps(optimizer, bundle_bytes=bundle_bytes) if device_type == "fake" else None
            for seed in range(3):
                set_gradients([parameter], seed)
                if journal is not None:
                    # Of a slice's 16 bytes an element, 12 are copied and 8 are temporaries; of 8 in the first step
                    # 4 are copied and 16 are states and temporaries.
                    beside = bundle_bytes * 20 // (16 if seed else 8) + (8 << 10)
                    made = 0 if seed else 2 * parameter.nbytes
                    device.set_limits(budget_bytes=device.live_bytes + made + beside)
                optimizer.step()
                device.set_limits()
            results.append(on_cpu(optimizer))
            assert journal is None or journal.recovered == 0
            del optimizer, parameter
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
