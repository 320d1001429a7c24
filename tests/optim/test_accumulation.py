"""A backward pass that adds to gradients of an earlier one is seen right before it does."""

import pytest
import torch
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

from lightning_memkit.optim.accumulation import watch_accumulation
from lightning_memkit.optim.gradient_dtype import set_grad_dtype


@pytest.fixture
def leaves():
    return [Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(3)]


@pytest.fixture
def seen(leaves):
    calls: list[list[torch.Tensor | None]] = []
    undo = watch_accumulation(lambda: leaves, lambda: calls.append([leaf.grad for leaf in leaves]))
    yield calls
    undo()
    assert not hasattr(torch.autograd.backward, "__wrapped__")


def backward(leaves, factor: float = 0.001) -> None:
    torch.stack([(leaf.float() * factor).sum() for leaf in leaves]).sum().backward()


def test_a_first_pass_and_one_after_zero_grad_are_none(leaves, seen):
    optimizer = torch.optim.SGD(leaves, 0.1)
    for set_to_none in (True, False, True):
        backward(leaves)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    assert seen == []


def test_kept_gradients_that_a_pass_does_not_reach_are_none(leaves, seen):
    backward(leaves[:1])
    backward(leaves[1:])  # as the other network's of two that are trained in turn
    assert seen == []
    leaves[0].requires_grad_(False)
    leaves[1].grad = leaves[2].grad = None
    backward(leaves)
    assert seen == []


def test_the_first_addition_is_seen_before_it_happens(leaves, seen):
    backward(leaves)
    before = [leaf.grad.clone() for leaf in leaves]
    backward(leaves[1:])
    assert len(seen) == 2  # one call a leaf
    assert not any(leaf._backward_hooks for leaf in leaves)
    assert not torch.equal(leaves[1].grad, before[1])


def test_a_change_of_dtype_in_it_loses_nothing(leaves):
    def widen() -> None:
        for leaf in leaves:
            set_grad_dtype(leaf, torch.float32)

    undo = watch_accumulation(lambda: leaves if leaves[0].grad_dtype != torch.float32 else (), widen)
    for _ in range(512):
        backward(leaves)
    undo()
    one = float(torch.tensor(0.001, dtype=torch.bfloat16))
    for leaf in leaves:
        torch.testing.assert_close(leaf.grad, torch.full((3,), 512 * one), rtol=1e-6, atol=0)


def test_recomputation_within_a_pass_is_part_of_it(leaves, seen):
    inputs = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    hidden = checkpoint(lambda x: x * leaves[0], inputs, use_reentrant=True)
    checkpoint(lambda x: x * leaves[0], hidden, use_reentrant=True).sum().backward()
    assert seen == []


def test_sparse_gradients_are_seen(seen, leaves):
    table = torch.nn.Embedding(4, 2, sparse=True)
    leaves[:] = [table.weight]
    for _ in range(2):
        table(torch.tensor([1])).sum().backward()
    assert len(seen) == 1
