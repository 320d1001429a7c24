"""Where Lightning makes, reads and saves loaders; `tests/plugins/test_seam_loader.py` checks its names."""

from collections.abc import Callable
from time import perf_counter
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.trainer.connectors import data_connector
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_memkit.utilities.patching import Undo


def take_training_loaders(trainer: Trainer, take: Callable[[Any], Any], checked: type) -> Undo:
    """Have `take` replace each training loader that Lightning has prepared; returns the undo.

    Args:
        trainer: a trainer whose strategy exists.
        take: returns the replacement of a loader.
        checked: a class of loaders for which Lightning's warning about few workers is suppressed.
    """
    strategy: Any = trainer.strategy
    process, check = strategy.process_dataloader, data_connector._worker_check

    def process_dataloader(dataloader: Any) -> Any:
        return process(take(dataloader) if trainer.training else dataloader)

    def worker_check(trainer: Any, dataloader: Any, name: str) -> None:
        if not isinstance(dataloader, checked):
            check(trainer=trainer, dataloader=dataloader, name=name)

    strategy.process_dataloader = process_dataloader
    data_connector._worker_check = worker_check

    def undo() -> None:
        vars(strategy).pop("process_dataloader", None)
        data_connector._worker_check = check

    return undo


def watch_fetches(trainer: Trainer, begins: Callable[[], None], ends: Callable[[], None]) -> Undo:
    """Call `begins` before and `ends` after each training batch is fetched; returns the undo."""
    loop: Any = trainer.fit_loop.epoch_loop
    before, after = loop._on_before_fetch, loop._on_after_fetch

    def on_before_fetch() -> None:
        before()
        begins()

    def on_after_fetch() -> None:
        ends()
        after()

    loop._on_before_fetch, loop._on_after_fetch = on_before_fetch, on_after_fetch

    def undo() -> None:
        vars(loop).pop("_on_before_fetch", None)
        vars(loop).pop("_on_after_fetch", None)

    return undo


def training_loaders(trainer: Trainer) -> list[Any]:
    """The loaders of this fit; empty before they are made."""
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else list(combined.flattened)


def batches_left(trainer: Trainer) -> float:
    """Training batches that remain in this epoch; infinite if unknown."""
    loop = trainer.fit_loop
    return loop.max_batches - loop.epoch_loop.batch_progress.current.ready


def is_within_an_epoch(trainer: Trainer) -> bool:
    """Whether this fit resumes in the middle of an epoch."""
    return trainer.fit_loop.restarted_mid_epoch


def forget_loader_states(checkpoint: dict[str, Any]) -> None:
    """Remove loader states from Lightning's part of a checkpoint, so it also loads with other loaders."""
    checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).pop("combined_loader", None)


def transfer_hooks(trainer: Trainer) -> list[str]:
    """The user's hooks that expect a batch on the host."""
    owners: tuple[Any, ...] = (trainer.lightning_module, getattr(trainer, "datamodule", None))
    found = []
    for owner in owners:
        parent = LightningModule if isinstance(owner, LightningModule) else LightningDataModule
        for name in ("on_before_batch_transfer", "transfer_batch_to_device"):
            if owner is not None and is_overridden(name, owner, parent):
                found.append(f"{type(owner).__name__}.{name}")
    return found


def training_source(trainer: Trainer) -> Any:
    """The source of training batches: a DataLoader, or the module or datamodule that makes one."""
    return trainer.fit_loop._data_source.instance


def time_data_waits(trainer: Trainer) -> tuple[Callable[[], float], Undo]:
    """Return a function that gives the seconds spent waiting for the training loader so far, and the undo."""
    waited, started = 0.0, 0.0
    profiler: Any = vars(trainer)["profiler"]
    start, stop = profiler.start, profiler.stop

    def timed_start(action_name: str) -> None:
        nonlocal started
        if action_name.endswith("train_dataloader_next"):
            started = perf_counter()
        start(action_name)

    def timed_stop(action_name: str) -> None:
        nonlocal waited
        stop(action_name)
        if action_name.endswith("train_dataloader_next"):
            waited += perf_counter() - started

    profiler.start, profiler.stop = timed_start, timed_stop

    def undo() -> None:
        vars(profiler).pop("start", None)
        vars(profiler).pop("stop", None)

    return lambda: waited, undo
