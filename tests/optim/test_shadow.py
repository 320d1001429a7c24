"""What the engine computes, against float32 masters stepped by torch's own optimizers."""

import math
from copy import deepcopy

import pytest
import torch
from torch.nn import Parameter

from lightning_memkit.optim.compensation import compensate
from lightning_memkit.optim.pieces import slots
from lightning_memkit.optim.shadow import ShadowEngine
from lightning_memkit.optim.stochastic_rounding import StochasticRounding
from tests.optim.helpers import (
    OPTIMIZERS,
    all_tensors,
    assert_same_bits,
    bf16_twins,
    copy_gradients,
    set_gradients,
    shapes_for,
    trained_beside_masters,
    two_groups,
)

SMALL_BUCKETS = 16 * 1300  # several buckets for the helpers' shapes


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_split_with_exact_states_is_bitwise_an_fp32_master(name):
    trained_weights = trained_beside_masters(OPTIMIZERS[name], shapes_for(name), bucket_bytes=SMALL_BUCKETS)
    for parameter, trained, master in trained_weights:
        assert torch.equal(trained.view(torch.int32), master.detach().view(torch.int32))
        assert not torch.equal(trained, parameter.detach().float())  # the low half holds something


def norm_ratio_under_decay(mode: str | None, start: torch.Tensor) -> float:
    parameters, low_halves = bf16_twins([start])
    optimizer = torch.optim.AdamW(parameters, lr=3e-4, weight_decay=0.1, foreach=False)
    handle = compensate(optimizer, mode=mode, low_halves=low_halves) if mode else None  # pyright: ignore
    before = start.double().norm()
    parameters[0].grad = torch.zeros_like(parameters[0])
    for _ in range(5000):
        optimizer.step()
    trained = next(iter(handle.float32_weights()))[1] if handle else parameters[0].detach()
    return (trained.double().norm() / before).item()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("mode", "expected", "tolerance"),
    [
        ("split", (1 - 3e-4 * 0.1) ** 5000, 2e-4),
        ("kahan", (1 - 3e-4 * 0.1) ** 5000, 3e-3),
        ("split24", (1 - 3e-4 * 0.1) ** 5000, 3e-3),
        ("none", 1.0, 1e-3),
        (None, 1.0, 1e-3),  # plain bfloat16: decay vanishes
    ],
)
@pytest.mark.long
def test_weight_decay_acts_inside_the_compensated_sum(mode, expected, tolerance):
    assert norm_ratio_under_decay(mode, torch.randn(2000)) == pytest.approx(expected, abs=tolerance)


def drifted(mode: str, update: float, steps: int = 10_000) -> float:
    parameter = Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([parameter], lr=update, foreach=False)
    handle = compensate(optimizer, mode=mode)  # pyright: ignore[reportArgumentType]
    parameter.grad = -torch.ones_like(parameter)
    for _ in range(steps):
        optimizer.step()
    return next(iter(handle.float32_weights()))[1].item()


@pytest.mark.long
def test_small_updates_add_up():
    master = Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([master], lr=1e-4, foreach=False)
    master.grad = -torch.ones_like(master)
    for _ in range(10_000):
        optimizer.step()
    assert drifted("split", 1e-4) == master.item()
    assert drifted("kahan", 1e-4) == pytest.approx(2.0, abs=0.03)
    assert drifted("none", 1e-4) == 1.0


def test_stochastic_weights_are_right_on_average():
    parameter = Parameter(torch.ones(4000, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([parameter], lr=1e-4, foreach=False)
    compensate(optimizer, mode="stochastic")
    parameter.grad = -torch.ones_like(parameter)
    for _ in range(300):
        optimizer.step()
    assert parameter.float().mean().item() == pytest.approx(1.03, abs=2e-3)


def second_moment_after_a_drop(states: str | None) -> float:
    dtype = torch.bfloat16 if states else torch.float32
    parameter = Parameter(torch.ones(64, dtype=dtype))
    optimizer = torch.optim.AdamW([parameter], lr=1e-5, betas=(0.9, 0.999), foreach=False)
    if states == "nearest":
        parameter.grad = torch.ones_like(parameter)
    elif states:
        compensate(optimizer, mode="split", states=states)  # pyright: ignore[reportArgumentType]
    for step in range(4000):
        parameter.grad = torch.full_like(parameter, 1.0 if step < 1000 else 0.1)
        optimizer.step()
    return optimizer.state[parameter]["exp_avg_sq"].double().mean().item()


@pytest.mark.long
def test_a_compact_second_moment_does_not_stall():
    truth = second_moment_after_a_drop(None)
    assert second_moment_after_a_drop("compact") == pytest.approx(truth, rel=0.05)
    assert second_moment_after_a_drop("exact") == pytest.approx(truth, rel=1e-3)  # 0.1 in bfloat16
    assert second_moment_after_a_drop("nearest") > 5 * truth  # the control: torch on bfloat16


class CountingOptimizer(torch.optim.Optimizer):
    """Keeps its step count in the group, as ScheduleFree and optimi do."""

    def __init__(self, groups) -> None:
        super().__init__(groups, {"lr": 0.1, "k": 0})

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            for place, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    self.state[parameter]["place"] = place
                    parameter.data.sub_(group["lr"] * group["k"] * parameter.grad)


def test_group_scalars_advance_once_a_step_and_places_stay():
    parameters, _ = bf16_twins([torch.ones(10), torch.ones(10), torch.ones(10), torch.ones(10)])
    exception = Parameter(torch.ones(10))
    optimizer = CountingOptimizer([{"params": [*parameters[:2], exception]}, {"params": parameters[2:]}])
    compensate(optimizer, mode="split", bucket_bytes=1)  # a bucket a parameter
    for _ in range(3):
        for parameter in [*parameters, exception]:
            parameter.grad = torch.ones_like(parameter)
        parameters[3].grad = None
        optimizer.step()
    assert [group["k"] for group in optimizer.param_groups] == [3, 3]
    assert [optimizer.state[p]["place"] for p in [*parameters[:3], exception]] == [0, 1, 0, 2]
    assert parameters[3] not in optimizer.state
    assert torch.equal(exception.detach(), torch.ones(10).sub(0.1).sub(0.2).sub(0.1 * 3))
    assert [group["params"] for group in optimizer.param_groups] == [
        [*parameters[:2], exception],
        parameters[2:],
    ]


def test_parameters_without_gradient_and_scalar_weights():
    parameters, _ = bf16_twins([torch.randn(8, 8), torch.randn(()), torch.randn(0, 3)])
    optimizer = torch.optim.AdamW(parameters)
    compensate(optimizer)
    before = parameters[0].detach().clone()
    optimizer.step()  # nothing has a gradient
    parameters[1].grad = torch.ones_like(parameters[1])
    parameters[2].grad = torch.ones_like(parameters[2])
    optimizer.step()
    assert torch.equal(parameters[0].detach(), before)
    assert math.isfinite(parameters[1].item())


def test_float32_gradients_are_taken_as_they_are():
    parameters, low_halves = bf16_twins([torch.randn(50)])
    master = Parameter(torch.cat([torch.empty(0), next(iter(low_halves)).detach().float()]))
    optimizer, reference = torch.optim.SGD(parameters, lr=1.0), torch.optim.SGD([master], lr=1.0)
    handle = compensate(optimizer, mode="split")
    parameters[0].grad_dtype = torch.float32
    parameters[0].grad = torch.randn(50)
    master.grad = parameters[0].grad.clone()
    optimizer.step()
    reference.step()
    assert torch.equal(next(iter(handle.float32_weights()))[1], master.detach())


def test_sparse_gradients_are_refused():
    embedding = torch.nn.Embedding(10, 4, sparse=True, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    compensate(optimizer)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match=r"shape \(10, 4\) is sparse.*sparse=False"):
        optimizer.step()


def test_the_optimizers_random_state_is_left_alone():
    parameters, _ = bf16_twins([torch.randn(100)])
    optimizer = torch.optim.AdamW(parameters)
    compensate(optimizer, mode="stochastic")
    set_gradients(parameters, seed=0)
    before = torch.get_rng_state()
    optimizer.step()
    assert torch.equal(torch.get_rng_state(), before)


def test_bucket_size_does_not_change_the_result():
    results = []
    for bucket_bytes in (1, SMALL_BUCKETS, 1 << 30):
        torch.manual_seed(0)
        parameters, _ = bf16_twins([torch.randn(shape) for shape in shapes_for("AdamW")])
        optimizer = torch.optim.AdamW(two_groups(parameters))
        compensate(optimizer, mode="stochastic", bucket_bytes=bucket_bytes)
        for step in range(3):
            set_gradients(parameters, seed=step)
            optimizer.step()
        results.append(parameters)
    for other in results[1:]:
        assert all(torch.equal(left, right) for left, right in zip(results[0], other, strict=True))


@pytest.mark.parametrize("name", ["AdamW-fused", "SGD", "Adafactor", "NAdam"])
@pytest.mark.parametrize("mode", ["split", "stochastic", None])
def test_an_open_step_may_be_advanced_in_any_order(name, mode):
    results = []
    for one_by_one in (False, True):
        torch.manual_seed(0)
        parameters, _ = bf16_twins([torch.randn(shape) for shape in shapes_for(name)])
        parameters.append(Parameter(torch.randn(6, 6)))  # one that stays float32
        optimizer = OPTIMIZERS[name](two_groups(parameters))
        engine = ShadowEngine(mode, "compact", StochasticRounding(3), None)
        for step in range(3):
            set_gradients(parameters, seed=step)
            if one_by_one:
                opened = engine.begin(optimizer, optimizer.step)
                for slot in reversed(list(slots(optimizer))):
                    opened.advance([slot])
                    slot.parameter.grad = None
                opened.finish()
            else:
                engine.step(optimizer, optimizer.step)
        results.append(all_tensors(optimizer))
    assert_same_bits(*results)


def test_the_users_learning_rate_tensor_stays_the_one_that_is_read():
    parameters, low_halves = bf16_twins([torch.ones(40, 30), torch.ones(30)])
    rate = torch.tensor(1e-3)
    optimizer = torch.optim.AdamW(parameters, lr=rate, foreach=False)
    handle = compensate(optimizer, mode="split", low_halves=low_halves, bucket_bytes=SMALL_BUCKETS)
    set_gradients(parameters, seed=0)
    snapshot = handle.snapshot()
    optimizer.step()
    rate.fill_(0.0)  # as a scheduler or a captured graph does
    before = all_tensors(optimizer)[0]
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] is rate
    assert torch.equal(parameters[0], before)
    handle.restore(snapshot)
    assert rate.item() == pytest.approx(1e-3)


def test_bfloat16_states_of_uncompensated_training_go_on():
    """Adafactor's factored moments have another shape than the weight, and are bfloat16 in a stock checkpoint."""
    parameters, _ = bf16_twins([torch.randn(40, 30), torch.randn(30)])
    optimizer = torch.optim.Adafactor(parameters, lr=1e-2)
    set_gradients(parameters, seed=0)
    optimizer.step()
    assert optimizer.state[parameters[0]]["row_var"].dtype == torch.bfloat16
    masters = [Parameter(parameter.detach().float()) for parameter in parameters]
    truth = torch.optim.Adafactor(masters, lr=1e-2)
    truth.load_state_dict(deepcopy(optimizer.state_dict()))  # torch casts the states to the masters' dtype
    handle = compensate(optimizer, mode="split", states="exact")
    for step in range(1, 4):
        set_gradients(parameters, seed=step)
        copy_gradients(parameters, masters)
        optimizer.step()
        truth.step()
    for (_, trained), master in zip(handle.float32_weights(), masters, strict=True):
        assert torch.equal(trained, master.detach())
