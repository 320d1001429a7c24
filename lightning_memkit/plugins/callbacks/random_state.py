"""The state of every random number generator, in every checkpoint."""

import random
import warnings
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

KEY = "lightning_memkit_random_state"
State = dict[str, Any]


class RandomState(Callback):
    """Saves the random state in every checkpoint, so a resume draws the same random numbers; 10 KB.

    Python's, NumPy's and torch's generators (the CPU's and the training device's) of every rank are saved, as
    tensors and plain numbers that `weights_only=True` loads. They are restored at the matching point: at an
    epoch boundary before the next epoch's iterators are made, within an epoch after the iterators are
    restored. Resuming within an epoch also needs a loader with `state_dict` and `load_state_dict`.
    `MemkitCLI` and `OnDeviceStrategy` add this callback automatically.

    Limits: if batches draw random numbers in the training process (augmentation without workers), they are
    reproduced only if the resumed loader draws nothing of its own on its first batch. Lightning does not
    repeat a validation that followed the save, so the numbers that it drew are not drawn again.
    """

    def __init__(self) -> None:
        self._loaded: State | None = None
        self._after_step: State | None = None
        self._reading_draws: bool | None = None  # whether reading a batch draws numbers; None: not yet seen

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the states of all ranks; Lightning calls this on every rank."""
        state = capture(trainer.strategy.root_device)
        states: list[Any] = [state]
        if trainer.world_size > 1:
            states = [None] * trainer.world_size
            torch.distributed.all_gather_object(states, state)
        checkpoint[KEY] = {"ranks": states, "reading_draws": bool(self._reading_draws)}

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Restore at once, for strategies that load after `on_fit_start`."""
        if trainer.state.fn != TrainerFn.FITTING or KEY not in checkpoint:
            return
        states = checkpoint[KEY]["ranks"]
        self._reading_draws = checkpoint[KEY]["reading_draws"]
        if len(states) != trainer.world_size:
            warnings.warn(
                f"The checkpoint holds the random states of {len(states)} ranks and this run has "
                f"{trainer.world_size}, so random numbers are not continued; resume on {len(states)} ranks for "
                "the same numbers.",
                stacklevel=2,
            )
            return
        self._loaded = states[trainer.global_rank]
        self._restore(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore again: building the optimizers may have drawn numbers. Iterators are made after this."""
        self._restore(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """When resuming within an epoch, undo what creating the iterators has drawn."""
        if self._loaded is not None and _continues_an_epoch(trainer):
            self._restore(trainer)
        else:
            self._loaded = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Undo what a resumed iterator's first batch drew, unless reading batches itself draws."""
        if self._loaded is not None and not self._reading_draws:
            self._restore(trainer)
        self._loaded = None
        if self._after_step is not None and self._reading_draws is None:
            self._reading_draws = not _equal(self._after_step, capture(trainer.strategy.root_device))
        self._after_step = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Record the state before the next batch is read, until it is known whether reading draws numbers."""
        if self._reading_draws is None:
            self._after_step = capture(trainer.strategy.root_device)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Discard the recorded state: validation draws numbers, too, so comparing would mislead."""
        self._after_step = None

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Discard the recorded state: the next batch comes from new iterators, which draw their seeds."""
        self._after_step = None

    def _restore(self, trainer: Trainer) -> None:
        if self._loaded is not None:
            restore(self._loaded, trainer.strategy.root_device)


def capture(device: torch.device) -> State:
    """The generators' states as tensors and plain numbers."""
    version, words, gauss = random.getstate()
    numpy = np.random.get_state(legacy=False)
    state: State = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "torch": torch.get_rng_state(),
        "device_type": device.type,
    }
    if isinstance(numpy, dict) and numpy["bit_generator"] == "MT19937":
        state["numpy"] = {
            "key": torch.from_numpy(numpy["state"]["key"].astype(np.int64)),
            "position": int(numpy["state"]["pos"]),
            "has_gauss": int(numpy["has_gauss"]),
            "gauss": float(numpy["gauss"]),
        }
    if device.type == "cuda":
        state["device"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        state["device"] = torch.mps.get_rng_state()
    return state


def restore(state: State, device: torch.device) -> None:
    """Restore captured states; the device's state is skipped if the device type differs."""
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    if "numpy" in state:
        numpy = state["numpy"]
        key = numpy["key"].cpu().numpy().astype(np.uint32)
        np.random.set_state(("MT19937", key, numpy["position"], numpy["has_gauss"], numpy["gauss"]))
    torch.set_rng_state(_bytes(state["torch"]))
    if "device" in state and state["device_type"] == device.type:
        if device.type == "cuda":
            torch.cuda.set_rng_state(_bytes(state["device"]), device)
        else:
            torch.mps.set_rng_state(_bytes(state["device"]))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())
    return one == other


def _bytes(state: Tensor) -> Tensor:
    return state.cpu().to(torch.uint8)  # map_location may have moved it to another device


def _continues_an_epoch(trainer: Trainer) -> bool:
    """Whether this fit resumes within an epoch, rather than at the beginning of the next."""
    epochs, batches = trainer.fit_loop, trainer.fit_loop.epoch_loop
    finished = batches.restarted_on_train_batch_end and batches.batch_progress.is_last_batch
    return epochs.restarted_mid_epoch and not finished
