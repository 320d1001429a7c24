"""Snapshots of modules that are taken over from the step before are those of a walk over what is there now."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memkit.initialization.casting import cast_inputs
from lightning_memkit.micro_batching.changes.rollback import Rollback
from lightning_memkit.micro_batching.changes.spare_copies import SpareCopies

Change = Callable[[nn.Linear], object]


class Other(nn.Linear):
    """What a step makes of a layer."""


def noted(*_: Any) -> None:
    """A hook."""


CHANGES: dict[str, Change] = {
    "sets a number": lambda layer: setattr(layer, "in_features", layer.in_features + 1000),
    "sets an equal number": lambda layer: setattr(layer, "in_features", int("3000")),
    "adds an attribute": lambda layer: setattr(layer, "gain", 2.5),
    "adds a list": lambda layer: setattr(layer, "seen", [1]),
    "deletes an attribute": lambda layer: delattr(layer, "out_features"),
    "replaces a parameter": lambda layer: setattr(layer, "weight", nn.Parameter(torch.ones(2, 3))),
    "removes a parameter": lambda layer: setattr(layer, "bias", None),
    "registers a buffer": lambda layer: layer.register_buffer("mean", torch.ones(2)),
    "adds a module": lambda layer: layer.add_module("inner", nn.Tanh()),
    "adds a hook": lambda layer: layer.register_forward_hook(noted),
    "adds a hook of gradients": lambda layer: layer.register_full_backward_hook(noted),
    "is another class": lambda layer: setattr(layer, "__class__", Other),
    "is in evaluation": lambda layer: layer.eval(),
    "writes a weight": lambda layer: layer.weight.data.add_(1),
}


def said(layer: nn.Module) -> dict[str, Any]:
    """All of a layer: what its tables hold by identity, and values of tensors."""
    found = {"class": type(layer), "training": layer.training}
    for name, value in vars(layer).items():
        found[name] = {key: id(item) for key, item in value.items()} if isinstance(value, dict) else value
    del found["_is_full_backward_hook"]  # which stays once there was one
    return found | {f"values of {name}": tensor.tolist() for name, tensor in layer.state_dict().items()}


def kept_of(rollback: Rollback, path: str) -> list[int]:
    return [id(one) for one in rollback._kept if (one.place.path, one.place.name) == (path, "")]


def snapshots(model: nn.Module, spares: SpareCopies | None) -> Rollback:
    return Rollback(model, frozenset({("0", "weight")}), spares=spares)


def test_what_has_not_moved_is_not_walked_over_again() -> None:
    model: Any = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.Tanh())
    spares = SpareCopies(1 << 20)
    first = snapshots(model, spares)
    with torch.no_grad():
        model[0].weight.add_(1)  # as an optimizer does
    second = snapshots(model, spares)
    for path in ("0", "1", "2"):
        assert kept_of(first, path) == kept_of(second, path) != []
    assert kept_of(snapshots(model, None), "0") != kept_of(second, "0")


def test_hooks_of_memkit_do_not_matter() -> None:
    model: Any = nn.Sequential(nn.Linear(3, 2).bfloat16())
    spares = SpareCopies(1 << 20)
    cast_inputs(model, torch.bfloat16)
    assert model[0]._forward_pre_hooks
    assert kept_of(snapshots(model, spares), "0") == kept_of(snapshots(model, spares), "0")


@pytest.mark.parametrize("within", list(CHANGES))
@pytest.mark.parametrize("between", [None, *CHANGES])
def test_a_step_is_undone_to_what_was_there_when_it_began(between: str | None, within: str) -> None:
    model: Any = nn.Sequential(nn.Linear(3, 2))
    spares = SpareCopies(1 << 20)
    layer: Any = model[0]
    layer.in_features = 3000
    snapshots(model, spares)
    if between is not None:
        CHANGES[between](layer)
    before = said(layer)
    rollback = snapshots(model, spares)
    if within == "deletes an attribute" and between == within:
        return
    CHANGES[within](layer)
    rollback.restore()
    assert said(layer) == before


@pytest.mark.parametrize(
    "change", ["sets a number", "adds a list", "replaces a parameter", "registers a buffer"]
)
def test_a_step_that_changes_something_is_noticed(change: str) -> None:
    model: Any = nn.Sequential(nn.Linear(3, 2))
    spares = SpareCopies(1 << 20)
    layer: Any = model[0]
    layer.in_features = 2999
    snapshots(model, spares)
    rollback = snapshots(model, spares)
    CHANGES[change](layer)
    assert rollback.touched()


def test_a_module_in_another_one_s_place_is_walked_over() -> None:
    model: Any = nn.Sequential(nn.Linear(3, 2))
    spares = SpareCopies(1 << 20)
    snapshots(model, spares)
    model[0] = nn.Linear(3, 2)
    before = said(model[0])
    rollback = snapshots(model, spares)
    nn.init.zeros_(model[0].weight)
    rollback.restore()
    assert said(model[0]) == before
    assert set(spares.modules) == {"", "0"}
