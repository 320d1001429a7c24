"""The current run as arguments for a new Trainer, from which predictions of it start."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_memkit.optim.accumulation import ignoring_accumulation
from lightning_memkit.plugins.asked import splits_batches
from lightning_memkit.prediction.contained import NO_AUTOGRAD_IN_FORKS
from lightning_memkit.prediction.fake_results import contained_simulation
from lightning_memkit.utilities.patching import take_off_replacements

T = TypeVar("T")

_OURS, _LIGHTNINGS = "lightning_memkit.", "lightning."
_KEPT_CALLBACKS = (_OURS, "lightning.pytorch.callbacks.")


@dataclass(frozen=True, kw_only=True)
class GivenRun:
    """A module without our plugins' patches, and the arguments of a Trainer that has these plugins.

    Attributes:
        module: as the user gave it.
        arguments: precision, callbacks, clipping, and accumulation over at least two micro-batches, since
            only from the second on gradients exist during the forward.
        accumulated: loader batches in a step.
    """

    module: LightningModule
    arguments: dict[str, Any]
    accumulated: int


def predict_apart(trainer: Trainer, work: Callable[[GivenRun], T], *, timeout_s: float) -> T:
    """Return `work`'s result for the current run, which is left unchanged.

    `work` runs in a fork. Autograd does not work in a fork if this process has run a backward and has an
    accelerator (a second fit, a notebook); `work` then runs here, on a copy of the module that shares its
    tensors, and must not write to them. Predictions replace them by fake ones.

    Raises:
        PredictionError: the fork ended without a result.
        Exception: what `work` raises; without a fork also what copying the module raises.
    """
    try:
        return contained_simulation(lambda: work(_in_fork(trainer)), timeout_s=timeout_s)
    except RuntimeError as error:
        if NO_AUTOGRAD_IN_FORKS not in str(error):
            raise
    with ignoring_accumulation():
        return work(_beside(trainer))


def is_automatic(callback: Callback) -> bool:
    """Whether the callback itself chooses during the run which activations are saved."""
    return _predictable(callback) is not callback


def _in_fork(trainer: Trainer) -> GivenRun:
    """Remove our plugins from the module for good, since the fork is discarded."""
    module, callbacks = trainer.lightning_module, _callbacks(trainer)
    for callback in reversed([one for one in callbacks if type(one).__module__.startswith(_OURS)]):
        callback.teardown(trainer, module, "fit")
    trainer.precision_plugin.teardown()
    for parameter in module.parameters():
        parameter.grad = None
    return _given(trainer, module, _kept(callbacks), trainer.precision_plugin)


def _beside(trainer: Trainer) -> GivenRun:
    """Copy the module and plugins, and remove our patches from the copy; the run's own module keeps them."""
    module = trainer.lightning_module
    shared = [*module.parameters(), *module.buffers()]
    memo: dict[int, Any] = {id(trainer): None, **{id(tensor): tensor for tensor in shared}}
    module, callbacks, precision = copy.deepcopy(
        (module, _kept(_callbacks(trainer)), _anew(trainer.precision_plugin)), memo
    )
    take_off_replacements(module)
    return _given(trainer, module, callbacks, precision)


def _given(trainer: Trainer, module: LightningModule, callbacks: list[Callback], precision: Any) -> GivenRun:
    known = type(precision).__module__.startswith(_LIGHTNINGS)
    algorithm: Any = trainer.gradient_clip_algorithm
    arguments = {
        **({"precision": str(precision.precision)} if known else {"plugins": [_anew(precision)]}),
        "callbacks": [_predictable(one) for one in callbacks],
        "accumulate_grad_batches": max(2, trainer.accumulate_grad_batches),
        "gradient_clip_val": trainer.gradient_clip_val,
        "gradient_clip_algorithm": None if algorithm is None else algorithm.value,
    }
    return GivenRun(module=module, arguments=arguments, accumulated=trainer.accumulate_grad_batches)


def _callbacks(trainer: Trainer) -> list[Callback]:
    return vars(trainer)["callbacks"]


def _kept(callbacks: list[Callback]) -> list[Callback]:
    return [
        one
        for one in callbacks
        if type(one).__module__.startswith(_KEPT_CALLBACKS) and not splits_batches(one)
    ]


def _anew(precision: Any) -> Any:
    """A plugin with its options but without the run's optimizers, whose states would be counted twice."""
    anew = getattr(precision, "without_run", None)
    return precision if anew is None else anew()


def _predictable(callback: Callback) -> Callback:
    as_predicted = getattr(callback, "as_predicted", None)
    return callback if as_predicted is None else as_predicted()
