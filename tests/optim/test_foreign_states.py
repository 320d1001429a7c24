"""States of another optimizer are told before torch fails on them; those that can be resumed are not refused."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_memkit.optim.foreign_states import SavedNames, why_foreign

Made = Callable[..., Optimizer]
KINDS: dict[str, Made] = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "NAdam": torch.optim.NAdam,
    "SGD": lambda parameters: torch.optim.SGD(parameters, 1e-3, momentum=0.9),
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
}


def stepped(kind: Made) -> Optimizer:
    layer = nn.Linear(4, 4)
    optimizer = kind(layer.parameters())
    layer(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return optimizer


def fails(optimizer: Optimizer, saved: dict) -> bool:
    """Whether torch can't load the states, or not step with them."""
    try:
        optimizer.load_state_dict(saved)
        optimizer.step()
    except KeyError:
        return True
    return False


@pytest.mark.parametrize(("writer", "reader"), [*product(KINDS, KINDS)])
def test_what_torch_fails_on_is_told_and_nothing_else(writer: str, reader: str) -> None:
    saved, optimizer = stepped(KINDS[writer]).state_dict(), stepped(KINDS[reader])
    why = why_foreign(optimizer, SavedNames.of(saved))
    assert bool(why) == fails(optimizer, saved)
    if why:
        named = "Adam or AdamW" if writer in ("Adam", "AdamW") else writer
        assert why.startswith(f"it was written by {named} (")
        assert why.endswith(f"this run's is {reader}")


@pytest.mark.parametrize("reader", ["AdamW", "AdamW8bit", "Lion8bit"])
@pytest.mark.parametrize("writer", ["AdamW", "AdamW8bit", "Lion8bit", "torch"])
def test_so_is_what_bitsandbytes_fails_on(writer: str, reader: str) -> None:
    theirs = pytest.importorskip("bitsandbytes").optim
    saved = stepped(torch.optim.AdamW if writer == "torch" else getattr(theirs, writer)).state_dict()
    optimizer = stepped(getattr(theirs, reader))
    assert bool(why_foreign(optimizer, SavedNames.of(saved))) == fails(optimizer, saved)
    if writer != "torch":
        plain = stepped(torch.optim.AdamW)
        assert why_foreign(plain, SavedNames.of(saved)).startswith(
            "it was written by an optimizer of bitsandbytes (its states are"
        )


def test_older_checkpoints_that_lack_switches_are_resumed() -> None:
    saved = stepped(torch.optim.AdamW).state_dict()
    for group in saved["param_groups"]:
        for name in (
            "fused",
            "foreach",
            "differentiable",
            "capturable",
            "maximize",
            "decoupled_weight_decay",
        ):
            group.pop(name, None)
    assert not why_foreign(stepped(torch.optim.AdamW), SavedNames.of(saved))


def test_optimizers_that_nobody_knows_are_left_to_themselves() -> None:
    class Own(torch.optim.SGD):
        pass

    saved = stepped(torch.optim.AdamW).state_dict()
    assert not why_foreign(stepped(lambda parameters: Own(parameters, 1e-3)), SavedNames.of(saved))
