"""Large parameters are stepped in pieces: the same bits, bounded temporaries."""

import pytest
import torch
from torch.nn import Parameter

from lightning_memkit.optim import pieces
from lightning_memkit.optim.compensation import compensate
from lightning_memkit.optim.pieces import BYTES_IN_FLIGHT, Scratch, buckets_of, slots
from lightning_memkit.optim.stochastic_rounding import TILE
from tests.optim.helpers import (
    OPTIMIZERS,
    all_tensors,
    assert_same_bits,
    bf16_twins,
    copy_gradients,
    set_gradients,
    two_groups,
)

SHAPES = [(50, 41), (64,), (30, 30), (7, 3)]


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_ELEMENTS_CPU", 512)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "Muon"])
def test_pieces_are_bitwise_an_fp32_master_too(name, small_pieces):
    weights = [torch.randn(shape) for shape in SHAPES]
    masters = [Parameter(weight.clone()) for weight in weights]
    parameters, low_halves = bf16_twins(weights)
    theirs, ours = OPTIMIZERS[name](two_groups(masters)), OPTIMIZERS[name](two_groups(parameters))
    handle = compensate(ours, mode="split", states="exact", low_halves=low_halves)
    for step in range(10):
        set_gradients(parameters, seed=step)
        copy_gradients(parameters, masters)
        theirs.step()
        ours.step()
    for (parameter, trained), master in zip(handle.float32_weights(), masters, strict=True):
        assert torch.equal(trained, master.detach())
        for key, value in theirs.state[master].items():
            assert torch.equal(torch.as_tensor(ours.state[parameter][key]), torch.as_tensor(value)), key


def stepped(mode: str, states: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    parameters, low_halves = bf16_twins([torch.randn(shape) for shape in SHAPES])
    optimizer = torch.optim.AdamW(two_groups(parameters), foreach=False)
    compensate(optimizer, mode=mode, states=states, low_halves=low_halves)  # pyright: ignore
    for step in range(3):
        set_gradients(parameters, seed=step)
        optimizer.step()
    return all_tensors(optimizer)


@pytest.mark.parametrize("mode", ["split", "none"])
def test_pieces_change_nothing_but_the_noise(mode, monkeypatch):
    whole = stepped(mode, "exact")
    monkeypatch.setattr(pieces, "PIECE_ELEMENTS_CPU", 512)
    assert_same_bits(whole, stepped(mode, "exact"))


def test_the_noise_does_not_go_by_the_pieces(monkeypatch):
    results = []
    for most in (2 * TILE, TILE):
        monkeypatch.setattr(pieces, "PIECE_ELEMENTS_CPU", most)
        parameter = Parameter(torch.full((2 * TILE,), 1.0, dtype=torch.bfloat16))
        optimizer = torch.optim.Adagrad([parameter], lr=2**-8)
        compensate(optimizer, mode="stochastic")
        parameter.grad = -torch.ones_like(parameter)
        optimizer.step()
        results.append(parameter.detach())
    assert torch.equal(*results)
    first, second = results[0].chunk(2)
    assert 0.4 < (first == second).double().mean() < 0.6


def buckets(optimizer, bucket_bytes=None):
    return list(buckets_of(optimizer, list(slots(optimizer)), bucket_bytes))


def test_buckets_keep_to_their_bytes(small_pieces):
    parameters, _ = bf16_twins([torch.randn(shape) for shape in SHAPES])
    set_gradients(parameters, seed=0)
    for bucket in buckets(torch.optim.AdamW(parameters)):
        assert sum(piece.stop - piece.start for piece in bucket) <= 512
        assert len({piece.slot.index for piece in bucket}) == len(bucket)
    whole = buckets(torch.optim.Adafactor(parameters), bucket_bytes=BYTES_IN_FLIGHT * 1000)
    assert [[piece.slot.index for piece in bucket] for bucket in whole] == [[0], [1, 2, 3]]


def test_every_element_is_in_one_piece(small_pieces):
    parameters, _ = bf16_twins([torch.randn(shape) for shape in SHAPES])
    set_gradients(parameters, seed=0)
    seen = [torch.zeros(shape) for shape in SHAPES]
    for bucket in buckets(torch.optim.SGD(parameters, lr=0.1)):
        for piece in bucket:
            piece.view(seen[piece.slot.index]).add_(1)
    assert all(torch.equal(count, torch.ones_like(count)) for count in seen)


def test_gradients_of_other_strides_are_not_sliced(small_pieces):
    parameters, low_halves = bf16_twins([torch.randn(50, 41)])
    master = Parameter(next(iter(low_halves)).detach().float())
    optimizer, reference = torch.optim.AdamW(parameters), torch.optim.AdamW([master])
    handle = compensate(optimizer, mode="split", states="exact")
    parameters[0].grad = torch.randn(41, 50, dtype=torch.bfloat16).t()
    master.grad = parameters[0].grad.float()
    assert len(buckets(optimizer)) == 1
    optimizer.step()
    reference.step()
    assert torch.equal(next(iter(handle.float32_weights()))[1], master.detach())


def test_scratch_is_one_memory_for_all_buckets(small_pieces):
    parameters, _ = bf16_twins([torch.randn(50, 41)])
    set_gradients(parameters, seed=0)
    scratch = Scratch()
    places = []
    for bucket in buckets(torch.optim.AdamW(parameters)):
        scratch.begin_bucket(bucket)
        taken = [scratch.like(bucket[0].view(parameters[0])) for _ in range(4)]
        assert all(scratch.owns(tensor) for tensor in taken)
        assert len({tensor.data_ptr() for tensor in taken}) == 4
        places.append(taken[0].data_ptr())
        assert not scratch.owns(scratch.like(torch.empty(2200)))  # no room left: memory of its own
    assert len(set(places)) == 1


def test_no_scratch_memory_stays_in_the_states(small_pieces):
    class KeepsGradient(torch.optim.Optimizer):
        """Keeps a reference to the gradient, as some optimizers do with the last one."""

        def __init__(self, params) -> None:
            super().__init__(params, {"lr": 0.1})

        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    parameter.data.sub_(0.1 * parameter.grad)
                    self.state[parameter]["previous"] = parameter.grad

    parameters, _ = bf16_twins([torch.randn(8, 8), torch.randn(8, 8)])
    optimizer = KeepsGradient(parameters)
    compensate(optimizer, bucket_bytes=1)
    set_gradients(parameters, seed=0)
    gradients = [parameter.grad for parameter in parameters]
    optimizer.step()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert gradient is not None
        assert torch.equal(optimizer.state[parameter]["previous"], gradient.float())
