"""Stand-ins for gradients that were used and dropped: they cost nothing, and any use of them is an error."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memkit.memory.meter import ByteMeter
from lightning_memkit.optim.compensation import compensate
from lightning_memkit.optim.spent_gradients import GradientReader, SpentGradient, SpentGradients

READER = GradientReader("Own.optimizer_step", "clip elsewhere")


def parameter_with_stand_in(**options: Any) -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(3, 2, **options))
    parameter.grad = SpentGradient(parameter, READER)
    return parameter


USES: dict[str, Callable[[nn.Parameter], object]] = {
    "norm": lambda p: p.grad.norm(),  # pyright: ignore[reportOptionalMemberAccess]
    "data": lambda p: p.grad.data,  # pyright: ignore[reportOptionalMemberAccess]
    "in place": lambda p: p.grad.mul_(2),  # pyright: ignore[reportOptionalMemberAccess]
    "operator": lambda p: 2 * p.grad,  # pyright: ignore
    "clip": lambda p: nn.utils.clip_grad_norm_([p], 1.0),
    "clip by value": lambda p: nn.utils.clip_grad_value_([p], 1.0),
    "total": lambda p: nn.utils.get_total_norm([p.grad]),  # pyright: ignore[reportArgumentType]
    "keyword": lambda p: torch.add(input=torch.ones(3, 2), other=p.grad),  # pyright: ignore
    "step": lambda p: torch.optim.SGD([p], 0.1).step(),
    "print": lambda p: repr(p.grad),
    "copy": lambda p: copy.deepcopy(p.grad),
    "cast": lambda p: p.grad.float(),  # pyright: ignore[reportOptionalMemberAccess]
}


def test_a_fused_step_refuses_stand_ins_too_and_changes_nothing() -> None:
    """They have no memory: a kernel that took them for gradients would read from address 0."""
    parameters = [nn.Parameter(torch.randn(8).bfloat16()) for _ in range(3)]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    compensate(optimizer)
    for parameter in parameters:
        parameter.grad = torch.randn(8).bfloat16()
    optimizer.step()
    before = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        parameter.grad = SpentGradient(parameter, READER)
    with pytest.raises(RuntimeError, match="Own.optimizer_step uses the gradient of a parameter"):
        optimizer.step()
    assert all(map(torch.equal, parameters, before))


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_use_is_an_error(use, dtype):
    message = r"Own.optimizer_step uses the gradient of a parameter of shape \(3, 2\).*: clip elsewhere, or"
    with pytest.raises(RuntimeError, match=message):
        USES[use](parameter_with_stand_in(dtype=dtype))


def test_autograd_does_not_add_to_it():
    with pytest.raises(RuntimeError, match=r"shape \(3, 2\) gets a second gradient in one step"):
        parameter_with_stand_in().sum().backward()


def test_it_has_metadata_and_no_storage():
    with ByteMeter() as meter:
        parameter = nn.Parameter(torch.ones(1000))
        before = meter.peak_bytes
        parameter.grad = SpentGradient(parameter, READER)
        assert (parameter.grad.shape, parameter.grad.dtype) == (parameter.shape, torch.float32)
    assert meter.peak_bytes == before


@pytest.mark.parametrize("foreach", [False, True])
def test_zeroing(foreach):
    parameter = parameter_with_stand_in()
    optimizer = torch.optim.SGD([parameter], 0.1, foreach=foreach)
    optimizer.zero_grad(set_to_none=False)
    assert isinstance(parameter.grad, SpentGradient)
    assert parameter.grad.is_zeroed
    optimizer.zero_grad()
    assert parameter.grad is None


def test_stand_ins_go_and_gradients_that_took_their_place_stay():
    spent, parameters = SpentGradients(), [nn.Parameter(torch.ones(2)) for _ in range(3)]
    spent.note(parameters)
    spent.place(READER)
    given = parameters[1].grad = torch.ones(2)
    spent.remove()
    assert [parameter.grad for parameter in parameters] == [None, given, None]
    spent.note(parameters)
    spent.place(READER)
    spent.forget_step()
    assert parameters[0].grad is None
