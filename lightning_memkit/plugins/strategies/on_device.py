"""A strategy that builds a model on its training device."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn

from lightning_memkit.initialization.building import build_on
from lightning_memkit.plugins.callbacks._resumed_optimizers import ResumedOptimizers
from lightning_memkit.plugins.callbacks.random_state import RandomState
from lightning_memkit.plugins.misplaced import NoCallback
from lightning_memkit.plugins.seams import training_loop
from lightning_memkit.plugins.strategies._eight_bit import adapt_bitsandbytes_in

_DTYPES = {
    "64-true": torch.float64,
    "64": torch.float64,
    "32-true": torch.float32,
    "32": torch.float32,
    "16": torch.float32,  # Lightning's short names of mixed precision
    "bf16": torch.float32,
    "bf16-mixed": torch.float32,
    "16-mixed": torch.float32,
    "bf16-true": torch.bfloat16,
    "16-true": torch.float16,
}


class OnDeviceStrategy(NoCallback, SingleDeviceStrategy):
    """One device; `configure_model` and `Trainer.init_module` build directly there, at the precision's dtype.

    At most one float32 tensor is staged at a time, and the host holds no copy of the model. The random state
    is saved in every checkpoint. `Trainer(strategy="memkit")` works once this class is imported from
    `lightning_memkit`; the `memkit` command always knows the name. With `MemkitCLI` a model built in
    `__init__` is built on the device, too.

    Args:
        device: `auto` (the Trainer's accelerator and device), or a device such as `cuda:1`, `mps` or `cpu`.
        accelerator: as in every Lightning strategy.
        checkpoint_io: as in every Lightning strategy.
        precision_plugin: as in every Lightning strategy.

    Raises:
        ValueError: the device can't be parsed, or the Trainer is given more than one device.
    """

    strategy_name = "memkit"

    def __init__(
        self,
        device: str = "auto",
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        self._devices: list[torch.device] = [] if device == "auto" else [_device(device)]
        root = self._devices[0] if self._devices else torch.device("cpu")  # until the Trainer chooses
        super().__init__(root, accelerator, checkpoint_io, precision_plugin)
        self._requested = device

    def __repr__(self) -> str:
        return f"{type(self).__name__}(device={self._requested!r})"

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The one device, as the Trainer sets and reads it; empty until it is known."""
        return self._devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        if len(devices) != 1:
            raise ValueError(
                f"strategy='memkit' trains on one device and the Trainer has {len(devices)}; write devices=1, "
                "or choose a strategy for several devices, such as 'ddp'."
            )
        self._devices = devices
        self._root_device = devices[0]

    def connect(self, model: LightningModule) -> None:
        """Attach the model, and add the callback that saves the random state in checkpoints."""
        super().connect(model)
        trainer = getattr(model, "_trainer", None)
        if isinstance(trainer, Trainer):
            add_random_state(trainer)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make the module's optimizers; those of bitsandbytes keep 32-bit states for embeddings."""
        super().setup_optimizers(trainer)
        adapt_bitsandbytes_in(trainer.lightning_module, self.optimizers)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Modules made inside are on the device at the precision's dtype."""
        dtype = parameter_dtype(self.precision_plugin)
        with super().tensor_init_context(empty_init):
            if dtype is None:
                yield
            else:
                with build_on(self.root_device, dtype):
                    yield


def parameter_dtype(precision: Precision | str | None) -> torch.dtype | None:
    """The dtype of parameters under a precision plugin or a Trainer's `precision`.

    None for plugins that memkit does not know: they prepare modules themselves.
    """
    if precision is None:
        return torch.float32
    name = precision if isinstance(precision, str) else precision.precision
    return _DTYPES.get(str(name))


def add_random_state(trainer: Trainer) -> None:
    """Add what a resume needs to a Trainer that has none: `RandomState`, before the callbacks that save."""
    callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    for kind in (ResumedOptimizers, RandomState):
        if not any(isinstance(callback, kind) for callback in callbacks):
            callbacks.insert(0, kind())


def tell_epoch(module: LightningModule | None, dataloader: object) -> None:
    """Tell a training loader's sampler how many epochs are over, before it gives an order."""
    trainer = getattr(module, "_trainer", None)
    if isinstance(trainer, Trainer) and trainer.state.fn == TrainerFn.FITTING:
        _set_sampler_epoch(dataloader, training_loop.epoch_of(trainer))


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(
            f'device={name!r} is not a device; write "auto", "cpu", "mps" or "cuda:0".'
        ) from error
    return torch.device("cuda", 0) if device.type == "cuda" and device.index is None else device


if OnDeviceStrategy.strategy_name not in StrategyRegistry.available_strategies():
    OnDeviceStrategy.register_strategies(StrategyRegistry)
