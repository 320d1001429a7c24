"""Saved optimizer states come back bit for bit, and training goes on as if it had never stopped."""

import copy
import io
from collections.abc import Callable
from importlib import import_module

import pytest
import torch
from torch.nn import Parameter

from lightning_memkit.optim.compensation import compensate
from lightning_memkit.optim.eight_bit import adapt_bitsandbytes
from tests.optim.helpers import (
    OPTIMIZERS,
    all_tensors,
    assert_same_bits,
    bf16_twins,
    set_gradients,
    shapes_for,
    two_groups,
)

pytestmark = pytest.mark.usefixtures("short_rows")
MODES = ("kahan", "split", "split24", "stochastic", "none")
STATES = ("compact", "exact", "8-bit")
PACKAGES = {
    "bitsandbytes.optim.AdamW8bit": {"lr": 1e-3, "min_8bit_size": 64},
    "bitsandbytes.optim.AdamW": {"lr": 1e-3},
    "lion_pytorch.Lion": {"lr": 1e-3},
    "schedulefree.AdamWScheduleFree": {"lr": 1e-3, "warmup_steps": 5},
    "schedulefree.SGDScheduleFree": {"lr": 1e-3},
    "optimi.StableAdamW": {"lr": 1e-3, "triton": False, "foreach": False},
}
NAMES = (*OPTIMIZERS, *PACKAGES)
FAST_NAMES = (
    "AdamW-foreach",
    "SGD",
    "Adafactor",
    "Muon",
    "bitsandbytes.optim.AdamW8bit",
    "lion_pytorch.Lion",
)


def builder(name: str) -> Callable:
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    package, _, class_name = name.rpartition(".")
    pytest.importorskip(package.partition(".")[0])
    stock = getattr(import_module(package), class_name)

    def build(groups):
        optimizer = stock(groups, **PACKAGES[name])
        if hasattr(optimizer, "train"):  # ScheduleFree refuses a step otherwise
            optimizer.train()
        return optimizer

    return build


def build(name: str, mode: str, states: str, seed: int):
    torch.manual_seed(seed)
    parameters, low_halves = bf16_twins([torch.randn(shape) for shape in shapes_for(name)])
    exception = Parameter(torch.randn(6, 5))  # float32 beside the others
    optimizer = builder(name)(two_groups([*parameters, exception]))
    compensate(optimizer, mode=mode, states=states, low_halves=low_halves, seed=7)  # pyright: ignore
    if name.startswith("bitsandbytes"):
        adapt_bitsandbytes(optimizer)
    return [*parameters, exception], optimizer


def run(parameters, optimizer, steps) -> None:
    for step in steps:
        set_gradients(parameters, seed=step)
        optimizer.step()


def through_a_file(state_dict: dict) -> dict:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def matrix() -> list:
    """Every optimizer in every mode; a part of them in every run."""
    every = [(name, mode, states) for name in NAMES for mode in MODES for states in STATES]
    fast = {(name, MODES[i % 4], STATES[i // 2 % 2]) for i, name in enumerate(NAMES)}
    slow = pytest.mark.slow
    return [
        pytest.param(*case, marks=() if case in fast or case[0] in FAST_NAMES else slow) for case in every
    ]


@pytest.mark.parametrize(("name", "mode", "states"), matrix())
def test_resume_is_bitwise(name, mode, states):
    parameters, optimizer = build(name, mode, states, seed=0)
    run(parameters, optimizer, range(3))
    saved = through_a_file({"weights": [p.detach() for p in parameters], "optimizer": optimizer.state_dict()})
    others, resumed = build(name, mode, states, seed=1)  # other weights, no states
    for other, weight in zip(others, saved["weights"], strict=True):
        other.data.copy_(weight)
    resumed.load_state_dict(saved["optimizer"])
    assert_same_bits(all_tensors(optimizer), all_tensors(resumed))
    run(parameters, optimizer, range(3, 6))
    run(others, resumed, range(3, 6))
    assert_same_bits(all_tensors(optimizer), all_tensors(resumed))


def test_without_the_hooks_torch_destroys_the_states():
    """The control: what the hooks are for."""
    parameters, optimizer = build("AdamW-foreach", "split", "exact", seed=0)
    run(parameters, optimizer, range(3))
    plain = torch.optim.AdamW(two_groups(parameters))
    plain.load_state_dict(optimizer.state_dict())
    assert plain.state[parameters[0]]["low_half"].dtype == torch.bfloat16
    assert plain.state[parameters[0]]["exp_avg"].dtype == torch.bfloat16


def test_a_loaded_state_dict_stays_the_callers():
    parameters, optimizer = build("AdamW-foreach", "split", "compact", seed=0)
    run(parameters, optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(saved)
    others, resumed = build("AdamW-foreach", "split", "compact", seed=0)
    resumed.load_state_dict(saved)
    run(others, resumed, range(3, 6))
    for index, state in kept["state"].items():
        for name, value in state.items():
            assert torch.equal(value, saved["state"][index][name]), name


@pytest.mark.parametrize(
    ("saved_mode", "mode"),
    [("kahan", "split"), ("split", "kahan"), ("split", "none"), ("split24", "kahan"), ("split", "split24")],
)
def test_a_checkpoint_of_another_mode_keeps_its_low_halves(saved_mode, mode):
    parameters, optimizer = build("SGD", saved_mode, "exact", seed=0)
    run(parameters, optimizer, range(3))
    others, resumed = build("SGD", mode, "exact", seed=0)
    for other, parameter in zip(others, parameters, strict=True):
        other.data.copy_(parameter.data)
    resumed.load_state_dict(optimizer.state_dict())
    for group in [*optimizer.param_groups, *resumed.param_groups]:
        group["lr"] = 0.0
    before = [weight for _, weight in optimizer.__dict__["_memkit_compensation"].float32_weights()]
    run(others, resumed, [3])
    kept = {"kahan": "compensation", "split": "low_half", "split24": "low_byte", "none": None}[mode]
    names = resumed.state[others[0]].keys()
    assert {"compensation", "low_half", "low_byte"} & names == ({kept} - {None})
    after = [weight for _, weight in resumed.__dict__["_memkit_compensation"].float32_weights()]
    tolerance = 2**-15 if mode != "none" else 2**-8  # a rest is rounded up or down, not to nearest
    for left, right in zip(before, after, strict=True):
        assert ((left - right).abs() <= tolerance * left.abs()).all()


def test_states_of_plain_float32_training_are_taken_over():
    masters = [Parameter(torch.randn(20, 10))]
    plain = torch.optim.AdamW(masters, lr=1e-3)
    run(masters, plain, range(3))
    parameters, low_halves = bf16_twins([masters[0].detach()])
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    handle = compensate(optimizer, mode="split", states="exact", low_halves=low_halves)
    optimizer.load_state_dict(plain.state_dict())  # has no low halves: the captured ones stay
    set_gradients(parameters, seed=3)
    assert parameters[0].grad is not None
    masters[0].grad = parameters[0].grad.float()
    plain.step()
    optimizer.step()
    assert torch.equal(next(iter(handle.float32_weights()))[1], masters[0].detach())


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("name", NAMES)
def test_a_weight_that_was_never_stepped_keeps_its_low_half(name, steps):
    """Frozen layers: optimizers of torch look for "step" in every state that they load."""
    parameters, optimizer = build(name, "split", "compact", seed=0)
    frozen = parameters[1]
    for step in range(steps):
        set_gradients(parameters, seed=step)
        frozen.grad = None
        optimizer.step()
    low = optimizer.state[frozen]["low_half"].clone()
    others, resumed = build(name, "split", "compact", seed=1)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    assert torch.equal(resumed.state[others[1]]["low_half"], low)
    assert low.any()
    for other, parameter in zip(others, parameters, strict=True):
        other.data.copy_(parameter.data)
    run(parameters, optimizer, range(steps, steps + 2))
    run(others, resumed, range(steps, steps + 2))
    assert_same_bits(all_tensors(optimizer), all_tensors(resumed))


def test_a_failed_load_leaves_no_low_halves_behind():
    parameters, optimizer = build("SGD", "split", "exact", seed=0)
    run(parameters, optimizer, range(2))
    kept = all_tensors(optimizer)
    broken = optimizer.state_dict()
    broken["param_groups"] = broken["param_groups"][:1]
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict(broken)
    assert_same_bits(kept, all_tensors(optimizer))
    optimizer.load_state_dict(optimizer.state_dict())
    assert_same_bits(kept, all_tensors(optimizer))


class EveryDtype(torch.optim.SGD):
    """Keeps states of every dtype and shape there is, and counts its steps in some of them."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    for dtype in DTYPES:
                        state[str(dtype)] = (torch.rand(3, 2) * 100).to(dtype)
                    state["wide"] = torch.tensor(1.0 + 2**-40, dtype=torch.float64)
                    state["like"] = torch.rand_like(parameter)
                    state["nested"] = {"list": [torch.rand(2), 3], "tuple": (torch.arange(2), None)}
                    state["plain"] = [1.5, "text", True]
        return super().step(closure)


DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


def assert_same_values(left, right, path: str = "") -> None:
    assert type(left) is type(right), path
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype, path
        assert torch.equal(left, right), path
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), path
        for key, value in left.items():
            assert_same_values(value, right[key], f"{path}.{key}")
    elif isinstance(left, (list, tuple)):
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            assert_same_values(one, other, f"{path}.{index}")
    else:
        assert left == right, path


@pytest.mark.parametrize("mode", MODES)
def test_states_of_every_dtype_come_back_as_they_were(mode, monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "EveryDtype", lambda groups: EveryDtype(groups, lr=1e-2, momentum=0.9))
    parameters, optimizer = build("EveryDtype", mode, "exact", seed=0)
    run(parameters, optimizer, range(1))
    saved = optimizer.state_dict()
    assert saved["state"][0]["torch.int16"].dtype == torch.int16
    _, resumed = build("EveryDtype", mode, "exact", seed=1)
    resumed.load_state_dict(through_a_file(saved))
    assert_same_values(saved, resumed.state_dict())
