import pytest
import torch

from lightning_memkit.optim.state_dtypes import KEEP_FLOAT32, storage_of

LIKE = torch.empty(4, 3)
FLOATS = torch.empty(4, 3)
ADAM = {"exp_avg": FLOATS, "exp_avg_sq": FLOATS}


@pytest.mark.parametrize(
    ("name", "state", "group", "expected"),
    [
        ("exp_avg", ADAM, {"betas": (0.9, 0.999)}, "nearest"),
        ("exp_avg", ADAM, {"betas": (0.98, 0.999)}, "stochastic"),
        ("exp_avg_sq", ADAM, {"betas": (0.9, 0.95)}, "stochastic"),
        ("exp_avg", {"exp_avg": FLOATS}, {"betas": (0.9, 0.99)}, "stochastic"),  # Lion's momentum
        ("momentum_buffer", {}, {"momentum": 0.9}, "nearest"),
        ("momentum_buffer", {}, {"momentum": 0.99}, "stochastic"),
        ("momentum_buffer", {}, {}, "stochastic"),
        ("max_exp_avg_sq", ADAM, {"betas": (0.9, 0.999)}, "nearest"),
        ("z", {}, {"betas": (0.9, 0.999)}, "keep"),  # ScheduleFree's second copy of the weights
    ],
)
def test_names_and_decays_decide(name, state, group, expected):
    assert storage_of(name, FLOATS, state, group, LIKE) == expected


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(1.0),
        torch.empty(4, 1),
        torch.empty(4, 3, dtype=torch.float64),
        torch.empty(4, 3, dtype=torch.uint8),
        3,
    ],
)
def test_scalars_factors_and_other_dtypes_are_kept(value):
    assert storage_of("exp_avg_sq", value, ADAM, {"betas": (0.9, 0.999)}, LIKE) == "keep"


def test_an_optimizer_can_ask_for_float32():
    group = {"betas": (0.9, 0.999)}
    assert storage_of("state2", FLOATS, {KEEP_FLOAT32: True}, group, LIKE) == "keep"
    assert storage_of("state2", FLOATS, {}, group, LIKE) == "stochastic"
