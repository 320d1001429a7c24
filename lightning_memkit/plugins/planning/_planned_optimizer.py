"""Optimizers in plans: which 8-bit one could stand in for a module's, and predictions with it."""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from lightning_memkit.planning.eight_bit import EightBit, eight_bit_of, with_8_bit_states
from lightning_memkit.planning.problem import UnavailableError
from lightning_memkit.plugins.strategies._eight_bit import adapt_bitsandbytes_in


class _Answer(Exception):
    """Ends a prediction as soon as the optimizer is known; comes out of the process that predicts."""

    def __init__(self, found: EightBit | None, reason: str) -> None:
        super().__init__(found, reason)
        self.found, self.reason = found, reason


class _Asks(Callback):
    """Answers when the optimizers are there."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if len(trainer.optimizers) != 1:
            raise _Answer(
                None, f"{type(pl_module).__name__} has {len(trainer.optimizers)} optimizers, not one"
            )
        try:
            raise _Answer(eight_bit_of(trainer.optimizers[0]), "")
        except ValueError as error:
            raise _Answer(None, str(error)) from None


def eight_bit_for(ask: Callable[[Callback], None]) -> EightBit:
    """What could stand in for the module's optimizer; takes the set-up of a fit, without a step.

    Args:
        ask: lets a callback see a fit as it begins.

    Raises:
        UnavailableError: there is none.
    """
    if find_spec("bitsandbytes") is None:
        raise UnavailableError("states", "bitsandbytes is not installed (pip install bitsandbytes).")
    try:
        ask(_Asks())
    except _Answer as answer:
        if answer.found is not None:
            return answer.found
        raise UnavailableError("states", f"{answer.reason}.") from None
    raise UnavailableError("states", "the fit has no optimizer.")


class EightBitStates(Callback):
    """Puts bitsandbytes' optimizer in the place of the module's, for a prediction: changes the module for good."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        own = pl_module.configure_optimizers
        known: dict[int, Optimizer] = {}

        def instead_of(optimizer: Optimizer) -> Optimizer:
            if id(optimizer) not in known:
                known[id(optimizer)] = with_8_bit_states(optimizer)
                adapt_bitsandbytes_in(pl_module, [known[id(optimizer)]])
            return known[id(optimizer)]

        vars(pl_module)["configure_optimizers"] = lambda: _with(instead_of, own())


def _with(instead_of: Callable[[Optimizer], Optimizer], found: Any) -> Any:
    """What `configure_optimizers` gave, with other optimizers; schedulers get them, too."""
    if isinstance(found, Optimizer):
        return instead_of(found)
    if isinstance(found, Mapping):
        return {name: _with(instead_of, value) for name, value in found.items()}
    if isinstance(found, (list, tuple)):
        return type(found)(_with(instead_of, value) for value in found)
    if isinstance(getattr(found, "optimizer", None), Optimizer):
        found.optimizer = instead_of(found.optimizer)
    for inner in getattr(found, "_schedulers", ()):
        _with(instead_of, inner)
    return found
