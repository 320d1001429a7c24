# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
"""Modules without memory: the same buffers and ties as plain ones, memory on demand, and values for every tensor."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from lightning_memkit.initialization.building import build_empty, build_on
from lightning_memkit.initialization.materialization import give_memory, materialize
from tests.activations import test_transformers as classes
from tests.initialization.test_building import HAND_BUILT, Float32Bytes

BF16 = torch.bfloat16
NAMES = classes.NAMES
assert len(NAMES) == 17


def built(name, context):
    torch.manual_seed(5)
    with context:
        return classes.build(name)


def ties(module):
    groups = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return sorted(groups.values())


def assert_same_buffers(ours, plain):
    theirs = dict(plain.named_buffers())
    assert dict(ours.named_buffers()).keys() == theirs.keys()
    for name, buffer in ours.named_buffers():
        assert buffer.dtype == theirs[name].dtype, name
        assert torch.equal(buffer, theirs[name]), name


@pytest.mark.parametrize("name", NAMES)
def test_transformers_models_without_memory_have_the_buffers_of_plain_ones_and_get_values(name):
    torch.manual_seed(5)
    plain = classes.build(name)
    ours = built(name, build_empty("cpu", BF16))
    assert all(parameter.is_meta for parameter in ours.parameters())
    assert_same_buffers(ours, plain)
    assert ties(ours) == ties(plain)
    counter = Float32Bytes()
    with counter:
        materialize(ours, "cpu")
    assert_same_buffers(ours, plain)
    assert ties(ours) == ties(plain)
    twin = built(name, build_on("cpu", BF16))
    for key, parameter in ours.named_parameters():
        assert parameter.dtype == twin.get_parameter(key).dtype, key
        own, other = parameter.detach().float(), twin.get_parameter(key).detach().float()
        assert torch.isfinite(own).all(), key
        # The same initialiser: constants are equal, draws are spread alike.
        if float(other.std(correction=0)) == 0:
            assert torch.equal(own, other), key
        elif own.numel() > 200:
            assert float(own.std()) == pytest.approx(float(other.std()), rel=0.35), key
    largest = 4 * max(parameter.numel() for parameter in ours.parameters())
    tables = sum(
        4 * t.numel() for t in (*ours.buffers(), *(p for p in ours.parameters() if p.dtype == torch.float32))
    )
    assert counter.peak <= largest + 3 * tables + 1024


@pytest.mark.parametrize("name", NAMES)
def test_models_built_wholly_on_meta_get_their_tables_from_their_initialisers(name):
    torch.manual_seed(5)
    plain = classes.build(name)
    ours = built(name, torch.device("meta"))
    materialize(ours, "cpu")
    assert_same_buffers(ours, plain)
    assert ties(ours) == ties(plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, BF16])
@pytest.mark.parametrize("name", HAND_BUILT)
def test_hand_built_modules_are_built_without_memory(name, dtype):
    if name == "spectral_norm":
        pytest.skip("its buffers are computed from its weight")
    torch.manual_seed(5)
    plain = HAND_BUILT[name]()
    with build_empty("cpu", dtype):
        ours = HAND_BUILT[name]()
    assert ties(ours) == ties(plain)
    for key, parameter in ours.named_parameters():
        assert parameter.is_meta, key
        assert parameter.requires_grad == plain.get_parameter(key).requires_grad, key
        assert parameter.shape == plain.get_parameter(key).shape, key
    if dtype != torch.float64:
        assert_same_buffers(ours, plain)


def test_values_are_those_of_plain_initialisation_where_the_draws_come_in_the_same_order():
    def build():
        return nn.Sequential(
            nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2))
        )

    torch.manual_seed(3)
    with build_on("cpu", BF16):
        plain = build()
    with build_empty("cpu", BF16):
        ours = build()
    torch.manual_seed(3)
    materialize(ours, "cpu")
    for key, value in plain.state_dict().items():
        assert torch.equal(ours.state_dict()[key], value), key


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_a_tied_parameter_is_initialised_by_its_first_owner(dtype):
    with build_empty("cpu", dtype):
        ours = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 50))
        ours[1].weight = ours[0].weight
    materialize(ours, "cpu")
    assert ours[1].weight is ours[0].weight
    assert float(ours[0].weight.detach().float().std()) == pytest.approx(1, rel=0.1)
    assert float(ours[1].bias.detach().abs().max()) <= 64**-0.5


def test_what_has_values_keeps_them():
    with build_empty("cpu", BF16):
        ours = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    give_memory(ours, [ours[0].weight, ours[1].weight], "cpu")
    with torch.no_grad():
        ours[0].weight.fill_(2)
        ours[1].weight.fill_(3)
        ours[1].running_mean.fill_(4)
    materialize(ours, "cpu")
    assert ours[0].weight.tolist() == [[2, 2, 2]] * 3
    assert ours[1].weight.tolist() == [3, 3, 3]
    assert ours[1].running_mean.tolist() == [4, 4, 4]
    assert ours[1].bias.tolist() == [0, 0, 0]
    before = copy.deepcopy(ours.state_dict())
    materialize(ours, "cpu")  # nothing is on meta
    assert all(torch.equal(value, before[name]) for name, value in ours.state_dict().items())


class Gain(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool))


def test_modules_without_an_initialiser_are_named_with_the_remedy():
    with build_empty("cpu"):
        ours = nn.Sequential(nn.Linear(4, 4), Gain())
    with pytest.raises(
        ValueError, match=r"1\.gain: no initialiser .* Give 1 \(Gain\) a reset_parameters\(\)"
    ):
        materialize(ours, "cpu")
    with torch.device("meta"):
        ours = nn.Sequential(nn.Linear(4, 4), Gain())
    with pytest.raises(ValueError, match=r"1\.gain, 1\.mask: .* build_empty keeps buffers"):
        materialize(ours, "cpu")


def test_parameters_stay_the_same_objects_for_optimizers():
    with build_empty("cpu"):
        ours = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    ours.weight.tag = "kept"
    materialize(ours, "cpu")
    before = ours.weight.detach().clone()
    ours(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert not torch.equal(ours.weight, before)
    assert ours.weight.tag == "kept"


def test_a_build_without_memory_within_one_with_memory():
    with build_on("cpu", BF16):
        real = nn.Linear(2, 2)
        with build_empty("cpu", BF16):
            empty = nn.Linear(2, 2)
        again = nn.Linear(2, 2)
    assert empty.weight.is_meta
    assert empty.weight.dtype == real.weight.dtype == again.weight.dtype == BF16
    assert not real.weight.is_meta
    assert not again.weight.is_meta


def test_parametrized_modules_can_be_built_without_memory():
    with build_empty("cpu", BF16):
        ours = weight_norm(nn.Linear(4, 6))
    assert all(parameter.is_meta for parameter in ours.parameters())
