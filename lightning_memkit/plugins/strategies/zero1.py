"""ZeRO-1: DDP whose optimizer states are sharded over the ranks."""

import inspect
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch.optim import Optimizer

from lightning_memkit.distributed.shared_states import keep_low_halves, tell_weights
from lightning_memkit.optim.eight_bit import is_bitsandbytes
from lightning_memkit.plugins.misplaced import NoCallback
from lightning_memkit.plugins.strategies._eight_bit import adapt_bitsandbytes_in
from lightning_memkit.plugins.strategies.on_device import add_random_state, tell_epoch

_BITSANDBYTES = ("min_8bit_size", "percentile_clipping", "block_wise")  # kept outside its `defaults`


class ZeRO1Strategy(NoCallback, DDPStrategy):
    """DDP where each of n ranks keeps and steps 1/n of the optimizer states; costs one more broadcast a step.

    The module's own optimizers are rebuilt as `ZeroRedundancyOptimizer`, with their groups, options and
    schedulers; the module needs no code for it. Weights and gradients stay whole on every rank;
    `FSDP2Strategy` shards those, too. Works with `PureBF16Precision` and with the 8-bit optimizers of
    bitsandbytes. `Trainer(strategy="memkit_zero1")` works once this class is imported. Not yet verified on a
    GPU.

    Args:
        options: those of Lightning's `DDPStrategy`.

    Raises:
        ValueError: at setup, an optimizer can't be rebuilt from its options, or steps all weights together
            (LBFGS).

    Source: torch.distributed.optim.ZeroRedundancyOptimizer; Rajbhandari et al., ZeRO, 2020, arXiv:1910.02054.
    """

    strategy_name = "memkit_zero1"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._options = options

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self._options.items())
        return f"{type(self).__name__}({options})"

    def connect(self, model: LightningModule) -> None:
        """Attach the model, and add the callback that saves the random state in checkpoints."""
        super().connect(model)
        trainer = getattr(model, "_trainer", None)
        if isinstance(trainer, Trainer):
            add_random_state(trainer)

    def process_dataloader(self, dataloader: object) -> object:
        """Tell the sampler its epoch now: Lightning does so only after a resumed run has begun to read."""
        tell_epoch(self.lightning_module, dataloader)
        return dataloader

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make the module's optimizers, then replace them by sharded ones, also in their schedulers."""
        super().setup_optimizers(trainer)
        shared = {id(one): _shared_out(one) for one in self.optimizers}
        self.optimizers = [shared[id(one)] for one in self.optimizers]
        for config in self.lr_scheduler_configs:
            for scheduler in _schedulers(config.scheduler):
                if id(scheduler.optimizer) in shared:
                    scheduler.optimizer = shared[id(scheduler.optimizer)]
        adapt_bitsandbytes_in(
            trainer.lightning_module, [getattr(one, "optim", one) for one in self.optimizers]
        )

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load each rank's shard of the states, then broadcast the weights that belong to them."""
        super().load_optimizer_state_dict(checkpoint)
        tell_weights(self.optimizers)


def _shared_out(optimizer: Optimizer) -> Optimizer:
    """The optimizer over one rank's shard; the group dictionaries stay the same objects, for schedulers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # raised by torch's own import there
        from torch.distributed.optim import ZeroRedundancyOptimizer
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        return optimizer
    kind, options = type(optimizer), _options_of(optimizer)
    if "closure" in inspect.signature(kind.step).parameters and _demands_closure(kind):
        raise ValueError(
            f"{kind.__name__} steps all weights together and can't be shared out by parameters: use strategy='ddp'."
        )
    try:
        shared = ZeroRedundancyOptimizer(optimizer.param_groups, kind, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{kind.__module__}.{kind.__qualname__} can't be rebuilt from its options {sorted(options)} ({error}); "
            "make a ZeroRedundancyOptimizer in configure_optimizers, or use strategy='ddp'."
        ) from error
    _count_steps(shared)
    keep_low_halves(shared)
    return shared


def _options_of(optimizer: Optimizer) -> dict[str, Any]:
    """The options that its class accepts; torch's optimizers keep more than these in `defaults`."""
    taken = inspect.signature(type(optimizer)).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in taken}
    if is_bitsandbytes(optimizer):
        kept: Any = vars(optimizer).get("args")
        options |= {
            name: getattr(kept, name) for name in _BITSANDBYTES if name in taken and hasattr(kept, name)
        }
        if "is_paged" in taken:
            options["is_paged"] = getattr(optimizer, "is_paged", False)
    return options


def _demands_closure(kind: type[Optimizer]) -> bool:
    return inspect.signature(kind.step).parameters["closure"].default is inspect.Parameter.empty


def _schedulers(scheduler: Any) -> Iterator[Any]:
    """A scheduler and the schedulers that it contains (SequentialLR, ChainedScheduler)."""
    if hasattr(scheduler, "optimizer"):
        yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _schedulers(inner)


def _count_steps(optimizer: Any) -> None:
    """Mark steps as torch's schedulers expect: they were attached to another optimizer."""
    plain = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True
        return plain(*args, **kwargs)

    step._wrapped_by_lr_sched = True  # pyright: ignore[reportFunctionMemberAccess]
    optimizer.step = step


if ZeRO1Strategy.strategy_name not in StrategyRegistry.available_strategies():
    StrategyRegistry.register(ZeRO1Strategy.strategy_name, ZeRO1Strategy)
