"""What a function's source tells of the attributes that it uses."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from lightning_memkit.utilities.source_uses import uses_attribute


def direct(parameter: Any) -> Any:
    return [each.grad for each in parameter]


def nested() -> Any:
    def hook(parameter: Any) -> None:
        parameter.grad.mul_(2)

    return hook


def through(parameter: Any) -> Any:
    return direct(parameter)


def by_torch(module: Any) -> None:
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)


def by_name(module: Any) -> None:
    clip_grad_norm_(module.parameters(), 1.0)


def by_import(module: Any) -> None:
    from torch.nn.utils import clip_grad_value_

    clip_grad_value_(module.parameters(), 1.0)


def of_a_module(x: Any) -> Any:
    return torch.autograd.grad(x.sum(), x)


def by_other_methods(module: Any, optimizer: Any) -> None:
    module.zero_grad()
    optimizer.zero_grad()


def recursive(n: int) -> int:
    return recursive(n - 1)


class Owner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.probe = nn.Parameter(torch.ones(1))
        self.inner = SimpleNamespace(weight=torch.ones(1))

    @property
    def fails(self) -> Any:
        raise AssertionError("a property was run")

    def helper(self) -> Any:
        return [parameter.grad for parameter in self.parameters()]

    def by_method(self) -> Any:
        return self.helper()

    def of_its_own(self) -> Any:
        return self.probe.grad, self.inner.weight.grad

    def of_property(self) -> Any:
        return self.fails.grad

    def of_torch(self) -> None:
        self.zero_grad()
        self.cpu()


@pytest.mark.parametrize("function", [direct, nested, through, by_torch, by_name, by_import])
def test_uses_are_found(function):
    assert uses_attribute(function, "grad")
    assert not uses_attribute(function, "missing")


@pytest.mark.parametrize("function", [of_a_module, by_other_methods, recursive, len, torch.relu, 3])
def test_other_code_uses_none(function):
    assert not uses_attribute(function, "grad")


def test_methods_are_followed_and_named_objects_may_be_spared():
    owner = Owner()
    assert uses_attribute(owner.by_method, "grad")
    assert uses_attribute(owner.of_property, "grad")
    assert not uses_attribute(owner.of_torch, "grad")
    assert uses_attribute(owner.of_its_own, "grad")
    assert uses_attribute(owner.of_its_own, "grad", lambda named: named is owner.probe)
    assert not uses_attribute(owner.of_its_own, "grad", lambda named: isinstance(named, torch.Tensor))
