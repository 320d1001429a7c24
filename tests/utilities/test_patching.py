# pyright: reportAttributeAccessIssue=false
"""Methods replaced on instances, in layers."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

from lightning_memkit.activations.checkpointing import checkpoint_modules
from lightning_memkit.loss.switch import use_chunked_loss
from lightning_memkit.utilities.patching import replace_method
from tests.activations.models import transformers_model


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x, times=1):
        return self.weight * x * times


def adding(amount):
    return lambda self, plain, *args, **kwargs: plain(*args, **kwargs) + amount


def test_layers_call_those_below_and_come_off_in_any_order():
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)):
        net = Net()
        before = dict(vars(net))
        undos = [replace_method(net, "forward", adding(10**place)) for place in range(3)]
        left = 111
        assert net(1, times=2) == 2 + left
        for place in order:
            undos[place]()
            left -= 10**place
            assert net(1, times=2) == 2 + left
        assert vars(net) == before
        undos[0]()
        assert vars(net) == before


def test_a_method_of_the_instance_is_put_back():
    net = Net()
    net.forward = theirs = lambda x: -x
    undo = replace_method(net, "forward", adding(10))
    assert net(1) == 9
    undo()
    assert net.forward is theirs


def test_a_foreign_replacement_on_top_is_left_alone():
    net = Net()
    undo = replace_method(net, "forward", adding(10))
    ours = net.forward
    net.forward = theirs = lambda x: ours(x)
    undo()
    assert net.forward is theirs
    assert net(1) == 11


@pytest.mark.parametrize("layers", [1, 2])
def test_copies_run_their_own_method_in_all_layers(layers):
    net = Net()
    for _ in range(layers):
        replace_method(net, "forward", adding(10))
    twin = copy.deepcopy(net)
    with torch.no_grad():
        twin.weight.fill_(5)
    assert twin(1) == 5 + 10 * layers
    assert net(1) == 1 + 10 * layers
    assert pickle.loads(pickle.dumps(net)).weight == 1


def test_the_signature_shown_is_the_one_asked_for():
    net = Net()
    signature = inspect.signature(net.forward)
    replace_method(net, "forward", adding(1), like=Net.forward, mark="seen")
    assert inspect.signature(net.forward) == signature
    assert net.forward.seen


@pytest.mark.parametrize("chunked_first", [False, True])
def test_a_copy_of_a_model_under_a_budget_and_a_chunked_loss_trains_itself(chunked_first):
    model = transformers_model("LlamaForCausalLM").train()
    plain = copy.deepcopy(model)
    before = [dict(vars(module)) for module in model.modules()]
    patches = [lambda: checkpoint_modules(model, "budget:0.5"), lambda: use_chunked_loss(model)]
    undos = [patch() for patch in (patches[::-1] if chunked_first else patches)]
    ids = torch.randint(90, (2, 12))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for weight in (*twin.parameters(), *plain.parameters()):
            weight.mul_(1.5)
    torch.manual_seed(1)
    expected = plain(input_ids=ids, labels=ids).loss
    torch.manual_seed(1)
    loss = twin(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.testing.assert_close(loss, expected)
    assert all(weight.grad is None for weight in model.parameters())
    assert all(weight.grad is not None for weight in twin.parameters())
    for undo in undos:
        undo()
    assert [dict(vars(module)) for module in model.modules()] == before
    checkpoint_modules(model, "budget:0.5")()  # nothing is left that would refuse it
