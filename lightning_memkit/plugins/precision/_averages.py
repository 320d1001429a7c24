"""Lightning's weight averaging callbacks under `PureBF16Precision`: they average float32 weights, in float32.

It replaces the methods by which the callbacks read and write weights, which are private in `WeightAveraging`
and public in `StochasticWeightAveraging`; tests/plugins/test_averages.py checks their names.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from lightning_memkit.distributed.shared_states import float32_weights_of_owners, own_shares, tell_weights
from lightning_memkit.optim.averaging import (
    Loan,
    average_parameters,
    load_average,
    update_average,
    widen_average,
)
from lightning_memkit.utilities.patching import Undo


def average_in_float32(trainer: Trainer, optimizers: Sequence[Optimizer]) -> Undo:
    """Make the trainer's averaging callbacks average float32 weights, and write back weights with low halves.

    The averages stay float32 (4 bytes a value, on the callback's device). A callback whose class overrides
    the methods replaced here is left alone. If ranks shard the states (ZeRO-1), each sends the float32
    weights of its shard to the others whenever the average is updated: 4 bytes a parameter.

    Returns:
        The undo, for the end of the fit: restores the callbacks' own methods.
    """
    undo: list[Undo] = []
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(callback, WeightAveraging) and callback._average_model is not None:
            undo += _running_average(callback, callback._average_model, optimizers)
        elif isinstance(callback, StochasticWeightAveraging) and callback._average_model is not None:
            undo += _stochastic_average(callback, callback._average_model, optimizers)

    def undo_all() -> None:
        while undo:
            undo.pop()()

    return undo_all


def reload_averages(trainer: Trainer, checkpoint: Mapping[str, Any]) -> None:
    """Load averages again: for a module built in bfloat16, Lightning has rounded them on loading."""
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(callback, WeightAveraging) and "averaging_state" in checkpoint:
            average = callback._average_model
            if average is not None:
                average.module.load_state_dict(checkpoint["state_dict"])
        elif isinstance(callback, StochasticWeightAveraging):
            saved = checkpoint.get("callbacks", {}).get(callback.state_key, {}).get("average_model_state")
            if saved is not None and callback._average_model is not None:
                callback._average_model.load_state_dict(saved)


def _running_average(
    callback: WeightAveraging, average: AveragedModel, optimizers: Sequence[Optimizer]
) -> list[Undo]:
    widen_average(average.module)
    loan, own, wide = Loan(), own_shares(optimizers), float32_weights_of_owners(optimizers)

    def swap(pl_module: nn.Module) -> None:
        loan.swap(average.module, pl_module, own)

    def copy_average(pl_module: nn.Module) -> None:
        load_average(average.module, pl_module, own)
        tell_weights(optimizers)

    def update(model: nn.Module) -> None:
        update_average(average, model, own, wide)

    return [
        _replace(callback, WeightAveraging, "_swap_models", swap),
        _replace(callback, WeightAveraging, "_copy_average_to_current", copy_average),
        _replace(average, AveragedModel, "update_parameters", update),
    ]


def _stochastic_average(
    callback: StochasticWeightAveraging, average: nn.Module, optimizers: Sequence[Optimizer]
) -> list[Undo]:
    widen_average(average)
    own, wide = own_shares(optimizers), float32_weights_of_owners(optimizers)

    def update(averaged: nn.Module, model: nn.Module, n_averaged: Tensor, avg_fn: Any) -> None:
        def move(old: Tensor, new: Tensor) -> None:
            old.copy_(new if n_averaged == 0 else avg_fn(old, new, n_averaged.to(old.device)))

        average_parameters(averaged, model, own, move, wide)
        n_averaged += 1  # in place, since the tensor is the callback's

    def transfer(averaged: nn.Module, model: nn.Module) -> None:
        load_average(averaged, model, own, buffers=False)
        tell_weights(optimizers)

    return [
        _replace(callback, StochasticWeightAveraging, "update_parameters", update),
        _replace(callback, StochasticWeightAveraging, "transfer_weights", transfer),
    ]


def _replace(owner: Any, stock: type, name: str, function: Callable[..., None]) -> Undo:
    if getattr(type(owner), name) is not getattr(stock, name):
        return lambda: None
    vars(owner)[name] = function
    return partial(vars(owner).pop, name, None)
