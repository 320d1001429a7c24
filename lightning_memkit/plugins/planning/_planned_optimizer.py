"""Optimizers in plans: the 8-bit one that could replace a module's, and predictions with it."""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from lightning_memkit.planning.eight_bit import EightBit, eight_bit_of, with_8_bit_states
from lightning_memkit.planning.problem import UnavailableError
from lightning_memkit.plugins.strategies._eight_bit import adapt_bitsandbytes_in


class _Answer(Exception):
    """Ends a prediction as soon as the optimizer is known; crosses from the predicting process."""

    def __init__(self, found: EightBit | None, reason: str) -> None:
        super().__init__(found, reason)
        self.found, self.reason = found, reason


class _Asks(Callback):
    """Raises the answer as soon as the optimizers exist."""

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
    """The 8-bit optimizer that could replace the module's; costs the set-up of a fit, without a step.

    Args:
        ask: runs the beginning of a fit with a callback.

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
    """Replaces the module's optimizer by bitsandbytes' in a prediction; changes the module for good."""

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
    """The result of `configure_optimizers` with its optimizers replaced, also in schedulers."""
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
