"""Where Lightning's strategy and precision plugin move batches, synchronise, clip, scale and load states.

`tests/plugins/test_seam.py` checks the private names.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies import strategy as strategy_module
from torch import nn
from torch.optim import Optimizer

from lightning_memkit.plugins.seams.training_loop import finder_runs
from lightning_memkit.utilities.patching import Undo


def keep_samplers(trainer: Trainer) -> None:
    """Keep the loaders' samplers: on one device Lightning need not replace them by distributed ones."""
    trainer._accelerator_connector.use_distributed_sampler = False


def keep_batches_on_host(trainer: Trainer) -> tuple[Callable[[Any], Any], Undo]:
    """Leave training batches where the loader put them; returns the transfer of a micro-batch, and the undo.

    Lightning moves a whole batch before the step. The transfer hooks run once a micro-batch instead.
    """
    strategy = trainer.strategy
    transfer, stands_aside = strategy.batch_to_device, finder_runs(trainer)

    def batch_to_device(batch: Any, *args: Any, **kwargs: Any) -> Any:
        if trainer.training and not stands_aside() and trainer.lightning_module.automatic_optimization:
            return batch
        return transfer(batch, *args, **kwargs)

    strategy.batch_to_device = batch_to_device

    def undo() -> None:
        vars(strategy).pop("batch_to_device", None)

    return partial(transfer, dataloader_idx=0), undo


def communicates_in_every_part(trainer: Trainer) -> bool:
    """Whether ranks communicate in each forward and backward (sharded weights), not only in a step's last."""
    return trainer.world_size > 1 and not isinstance(trainer.strategy, DDPStrategy)


@contextmanager
def no_gradient_sync(trainer: Trainer, block: bool) -> Iterator[None]:
    """Under DDP, keep gradients local to the rank while `block` is true; other strategies are left alone."""
    strategy = trainer.strategy
    if block and isinstance(strategy, DDPStrategy):
        with strategy.block_backward_sync():
            yield
    else:
        yield


def clip_by(trainer: Trainer, clip: Callable[[Iterable[nn.Parameter], float], bool]) -> Undo:
    """Have `clip` clip gradients by norm; if it returns False, Lightning clips. Returns the undo."""
    precision = trainer.precision_plugin
    stock = precision.clip_grad_by_norm

    def clip_grad_by_norm(optimizer: Optimizer, clip_val: int | float) -> None:
        if not clip(precision.main_params(optimizer), clip_val):
            stock(optimizer, clip_val)

    precision.clip_grad_by_norm = clip_grad_by_norm

    def undo() -> None:
        vars(precision).pop("clip_grad_by_norm", None)

    return undo


def keep_scaler(trainer: Trainer) -> Undo:
    """Return a function that restores which gradients a gradient scaler has already unscaled."""
    scaler: Any = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is None:
        return lambda: None
    kept = {key: dict(state) for key, state in scaler._per_optimizer_states.items()}

    def undo() -> None:
        scaler._per_optimizer_states.clear()
        scaler._per_optimizer_states.update({key: dict(state) for key, state in kept.items()})

    return undo


def keep_states_in_place(trainer: Trainer, stays: Callable[[Optimizer], bool]) -> Undo:
    """Stop Lightning from moving some optimizers' states to the device after loading; returns the undo."""
    strategy = trainer.strategy
    load = strategy.load_optimizer_state_dict

    def load_in_place(*args: Any, **kwargs: Any) -> None:
        stock: Callable[..., None] = strategy_module._optimizer_to_device

        def move(optimizer: Optimizer, device: Any) -> None:
            if not stays(optimizer):
                stock(optimizer, device)

        strategy_module._optimizer_to_device = move
        try:
            load(*args, **kwargs)
        finally:
            strategy_module._optimizer_to_device = stock

    strategy.load_optimizer_state_dict = load_in_place

    def undo() -> None:
        vars(strategy).pop("load_optimizer_state_dict", None)

    return undo
