"""The benchmarks' FlashOptim is its paper's algorithm: near float32's steps, and nearest in the last of 24 bits."""

import torch
from torch.nn import Parameter

from benchmarks._flashoptim import FlashOptim


def test_it_trains_as_float32_does_but_for_its_rounding() -> None:
    torch.manual_seed(0)
    start = torch.randn(40, 50).bfloat16()
    ours, exact = Parameter(start.clone()), Parameter(start.float())
    pair = [
        (ours, FlashOptim([ours], lr=1e-3, weight_decay=0.1)),
        (exact, torch.optim.AdamW([exact], lr=1e-3, weight_decay=0.1)),
    ]
    for _ in range(50):
        gradient = torch.randn(40, 50).bfloat16()
        for parameter, optimizer in pair:
            parameter.grad = gradient.to(parameter.dtype)
            optimizer.step()
    found = pair[0][1]
    assert isinstance(found, FlashOptim)
    moved = (exact.detach() - start.float()).norm()
    assert 0 < (found.float32_weight(ours) - exact.detach()).norm() < 0.05 * moved


def test_a_weight_is_stored_to_the_nearest_of_255_steps() -> None:
    weight = Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = FlashOptim([weight], lr=1.0, betas=None, weight_decay=0.0)
    weight.grad = -torch.tensor([2**-9, 2**-12, 2**-20]).bfloat16()
    optimizer.step()
    moved = optimizer.float32_weight(weight) - 1
    step = 2**-8 / 127  # half a unit of 1.0 is 2^-8
    assert torch.equal((moved / step).round(), torch.tensor([64.0, 8.0, 0.0]))
    assert optimizer.state[weight]["error"].dtype == torch.int8
