"""Optimizers and prescribed gradients that several tests of the engine share."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_memkit.optim.compensation import compensate
from lightning_memkit.optim.split import split

SHAPES = ((40, 30), (30,), (5, 7), (16, 3))

MATRICES_ONLY = ("Muon",)

OPTIMIZERS: dict[str, Callable[[Iterable], Optimizer]] = {
    "AdamW-single": lambda groups: torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1, foreach=False),
    "AdamW-foreach": lambda groups: torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1, foreach=True),
    "AdamW-fused": lambda groups: torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1, fused=True),
    "AdamW-amsgrad": lambda groups: torch.optim.AdamW(groups, lr=1e-3, amsgrad=True),
    "Adam": lambda groups: torch.optim.Adam(groups, lr=1e-3, weight_decay=0.1),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, weight_decay=0.01, nesterov=True),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3, momentum=0.9, centered=True),
    "Adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-2),
    "Adadelta": lambda groups: torch.optim.Adadelta(groups),
    "Adamax": lambda groups: torch.optim.Adamax(groups),
    "NAdam": lambda groups: torch.optim.NAdam(groups),
    "RAdam": lambda groups: torch.optim.RAdam(groups),
    "ASGD": lambda groups: torch.optim.ASGD(groups, lr=1e-3),
    "Rprop": lambda groups: torch.optim.Rprop(groups, lr=1e-3),
    "Muon": lambda groups: torch.optim.Muon(groups, lr=1e-3),
}


def shapes_for(optimizer_name: str) -> list[tuple[int, ...]]:
    return [shape for shape in SHAPES if len(shape) == 2 or optimizer_name not in MATRICES_ONLY]


def two_groups(parameters: list[Parameter]) -> list[dict]:
    return [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 5e-3}]


def bf16_twins(weights: Iterable[Tensor]) -> tuple[list[Parameter], dict[Parameter, Tensor]]:
    """bfloat16 parameters of float32 weights, and the low halves that make them exact."""
    halves = [(Parameter(high), low) for high, low in map(split, weights)]
    return [parameter for parameter, _ in halves], dict(halves)


def set_gradients(parameters: Iterable[Parameter], seed: int) -> None:
    """Gradients that depend on the weights and on the seed, in the weights' dtype."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.grad = (0.1 * parameter.detach().float() + 0.1 * noise).to(parameter.dtype)


def copy_gradients(parameters: Iterable[Parameter], masters: Iterable[Parameter]) -> None:
    """Give float32 masters the gradients of their bfloat16 twins."""
    for parameter, master in zip(parameters, masters, strict=True):
        assert parameter.grad is not None
        master.grad = parameter.grad.float()


def trained_beside_masters(
    build: Callable[[list[dict]], Optimizer],
    shapes: Iterable[tuple[int, ...]],
    *,
    steps: int = 50,
    bucket_bytes: int | None = None,
) -> list[tuple[Parameter, Tensor, Parameter]]:
    """Split weights with exact states, and float32 masters that the same class steps from the same gradients.

    Two groups, clipping, and a scheduler of `steps` steps.

    Returns:
        For each parameter: itself, its float32 weight, its master.
    """
    weights = [torch.randn(shape) for shape in shapes]
    masters = [Parameter(weight.clone()) for weight in weights]
    parameters, low_halves = bf16_twins(weights)
    theirs, ours = build(two_groups(masters)), build(two_groups(parameters))
    handle = compensate(ours, mode="split", states="exact", low_halves=low_halves, bucket_bytes=bucket_bytes)
    schedulers = [
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps) for optimizer in (theirs, ours)
    ]
    for step in range(steps):
        set_gradients(parameters, seed=step)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        copy_gradients(parameters, masters)
        theirs.step()
        ours.step()
        for scheduler in schedulers:
            scheduler.step()
    trained = [weight for _, weight in handle.float32_weights()]
    return list(zip(parameters, trained, masters, strict=True))


def all_tensors(optimizer: Optimizer) -> list[Tensor]:
    """Copies of every weight and every state tensor, in order."""
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            found.append(parameter.detach().clone())
            state = optimizer.state.get(parameter, {})
            found += [
                state[name].detach().clone() for name in sorted(state) if isinstance(state[name], Tensor)
            ]
    return found


def assert_same_bits(first: list[Tensor], second: list[Tensor]) -> None:
    assert len(first) == len(second)
    for left, right in zip(first, second, strict=True):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
