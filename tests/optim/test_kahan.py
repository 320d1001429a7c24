import torch

from lightning_memkit.optim.kahan import kahan_join_, kahan_split_
from lightning_memkit.optim.stochastic_rounding import StochasticRounding


def round_trip(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weight = torch.empty_like(master, dtype=torch.bfloat16)
    rest = torch.empty_like(weight)
    joined = torch.empty_like(master)
    kahan_split_(master, weight, rest)
    kahan_join_(weight, rest, joined)
    return weight, rest, joined


def test_about_sixteen_bits_of_the_master_are_kept():
    master = torch.randn(100_000)
    weight, _, joined = round_trip(master)
    assert torch.equal(weight, master.to(torch.bfloat16))
    relative = ((joined - master).abs() / master.abs()).max()
    assert relative <= 2**-17
    assert ((weight.float() - master).abs() / master.abs()).max() > 2**-10  # the control: no compensation


def test_a_rest_below_its_own_precision_is_kept_on_average():
    master = torch.full((200_000,), 1.0 + 2**-9 + 0.3 * 2**-17)  # the rest lies 0.3 of the way between two
    weight = torch.empty_like(master, dtype=torch.bfloat16)
    rest = torch.empty_like(weight)
    rounding = StochasticRounding(seed=1)
    rounding.begin_step()
    kahan_split_(master, weight, rest, rounding, (0, 0))
    assert torch.equal(weight, master.to(torch.bfloat16))
    assert len(rest.unique()) == 2
    error = (weight.double() + rest.double() - master.double()).mean().abs().item()
    assert error < 5 * 2**-17 * (0.3 * 0.7 / master.numel()) ** 0.5
    kahan_split_(master, weight, rest)
    assert len(rest.unique()) == 1  # the control: to nearest, the same way every time


def test_infinity_and_nan_leave_no_rest():
    largest = torch.finfo(torch.float32).max
    weight, rest, joined = round_trip(torch.tensor([largest, -largest, torch.inf, torch.nan]))
    assert torch.equal(rest, torch.zeros(4, dtype=torch.bfloat16))
    assert joined[:3].isinf().all()
    assert joined[3].isnan()
    assert torch.equal(weight[:3].float(), joined[:3])


def test_a_stale_rest_counts_no_more_than_a_rest_can():
    """Someone else has set weights to zero, or scaled them, and left the old rests."""
    weight, rest, _ = round_trip(torch.randn(1000))
    for scale in (0.0, 0.1, 0.01):
        scaled, joined = (weight.float() * scale).bfloat16(), torch.empty(1000)
        kahan_join_(scaled, rest, joined)
        assert ((joined - scaled.float()).abs() <= 2**-8 * scaled.float().abs()).all()
    plain = weight.float() * 0.01 + rest.float()
    assert ((plain - weight.float() * 0.01).abs() > 0.1 * weight.float().abs() * 0.01).any()  # the control
