"""Modules of fake tensors, as in a prediction, are found as those with values are."""

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_memkit.activations.chunks.axes import AxisName
from lightning_memkit.activations.chunks.finding import find_chunkable
from tests.activations.chunks.test_finding import Mixed
from tests.activations.chunks.test_libraries import VOCABULARY, causal_model


def llama() -> tuple[nn.Module, Any]:
    net = causal_model()
    ids = torch.randint(3, VOCABULARY, (2, 30))
    return net, lambda: net(input_ids=ids, labels=ids).loss


def around_batch_norm() -> tuple[nn.Module, Any]:
    net, x = Mixed(), torch.randn(20, 6)
    return net, lambda: net.training_step(x)


class LargeTable(nn.Module):
    """Its own weights are more than are copied; what it holds is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1 << 20, 1 << 9)
        self.mlp = nn.Sequential(nn.Linear(512, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))

    def forward(self, ids: Any) -> Any:
        return self.mlp(self.table(ids))


def without_values(net: nn.Module, mode: FakeTensorMode) -> None:
    for part in net.modules():
        for name, weight in part._parameters.items():
            if weight is not None:
                part._parameters[name] = nn.Parameter(mode.from_tensor(weight.detach()))
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = mode.from_tensor(buffer)


@pytest.mark.parametrize("axis", ["rows", "tokens"])
@pytest.mark.parametrize("build", [llama, around_batch_norm])
def test_what_is_found_without_values(build: Any, axis: AxisName) -> None:
    with torch.random.fork_rng():
        net, step = build()
        expected = [one.name for one in find_chunkable(net, step, axis)]
        net, step = build()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        without_values(net, mode)
        found = [one.name for one in find_chunkable(net, step, axis)]
    assert found == expected
    assert axis == "tokens" or found


def test_a_module_too_large_to_copy_is_not_asked_but_what_it_holds() -> None:
    with FakeTensorMode():
        net, ids = nn.ModuleDict({"large": LargeTable()}), torch.zeros(2, 8, dtype=torch.int64)
        found = find_chunkable(net, lambda: net["large"](ids).sum(), "tokens")
    assert [one.name for one in found] == ["large.mlp"]
