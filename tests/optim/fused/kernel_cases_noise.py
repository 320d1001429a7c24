"""The kernels' noise: uniform, independent, repeatable; see kernel_runs.py."""

import torch

from lightning_memkit.optim.stochastic_rounding import StochasticRounding
from tests.optim.fused.kernel_runs import ADD, noise, numpy_may_warn, rounded_with, step
from tests.optim.fused.rules import operand, rounding

pytestmark = numpy_may_warn


def test_stochastic_weights_take_noise_of_their_own():
    start = operand(ADD, "stochastic", 3000, index=4)
    start.gradient.fill_(2**-10)
    exact = start.weight.float() + 2**-10
    step(ADD, "stochastic", [start], rounding())
    assert torch.equal(start.weight, rounded_with(exact, noise(rounding(), 4, 0, 3000) & 0xFFFF))


def up(index: int, number: int, count: int = 1 << 16, seed: int = 0) -> torch.Tensor:
    """Which elements of 1 + 0.3 of a bfloat16's distance round up."""
    start = operand(ADD, "stochastic", count, index=index, gradient_dtype=torch.float32)
    start.weight.fill_(1.0)
    start.gradient.fill_(0.3 * 2**-7)
    stream = StochasticRounding(seed)
    stream.step = number
    step(ADD, "stochastic", [start], stream)
    return start.weight > 1


def test_the_mean_is_the_value_and_streams_are_independent():
    count = 1 << 16
    base = up(3, 1)
    deviation = (0.3 * 0.7 / count) ** 0.5
    agreement = 0.3**2 + 0.7**2
    for other in (up(3, 2), up(4, 1), up(3, 1, seed=1)):
        assert abs(other.double().mean() - 0.3) < 5 * deviation
        same = (base == other).double().mean()
        assert abs(same - agreement) < 5 * (agreement * (1 - agreement) / count) ** 0.5
    assert torch.equal(base, up(3, 1))
    for distance in (1, 2, 8, 32, 1024, 4096, 1 << 15):  # lanes, threads, warps, blocks
        same = (base[:-distance] == base[distance:]).double().mean()
        assert abs(same - agreement) < 5 * (agreement * (1 - agreement) / (count - distance)) ** 0.5


def test_every_bit_of_the_noise_is_fair_and_both_halves_are_independent():
    """On the twin, which the kernels equal bit for bit above: every step and element is as likely up as down."""
    stream = StochasticRounding(9)
    bits = []
    for stream.step in range(1, 65):
        bits.append(noise(stream, 2, 0, 1 << 12))
    drawn = torch.stack(bits)
    places = (drawn[..., None] >> torch.arange(32)) & 1
    mean = places.double().mean((0, 1))
    assert (mean - 0.5).abs().max() < 5 * 0.5 / drawn.numel() ** 0.5
    over_steps = places.double().mean(0)
    assert (over_steps - 0.5).abs().max() < 7 * 0.5 / 64**0.5
    pairs = torch.corrcoef(places.reshape(-1, 32).double().T) - torch.eye(32)
    assert pairs.abs().max() < 6 / drawn.numel() ** 0.5
