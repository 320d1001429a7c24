"""The Lightning adapter of `LoaderTuning`: it times the training loop and sets the workers of its loader."""

import math
import warnings
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_memkit.data.loading.host_memory import host_room
from lightning_memkit.data.loading.load_times import LoadTimes, Measured
from lightning_memkit.data.loading.loader_tuning import (
    MOST_WORKERS,
    Bounds,
    LoaderPlan,
    LoaderTuning,
    of_all_ranks,
    start_costs,
)
from lightning_memkit.data.loading.resumable_loader import ResumableLoader, with_other_ranks
from lightning_memkit.memory.processors import usable_processors
from lightning_memkit.micro_batching.ranks.agreement import any_rank, largest_of_ranks, values_of_ranks
from lightning_memkit.plugins.data._training_loaders import TrainingLoaders
from lightning_memkit.plugins.pickling import LeavesRunBehind
from lightning_memkit.plugins.seams import loaders
from lightning_memkit.plugins.seams.bars import info
from lightning_memkit.plugins.seams.lightning_run import LightningRun
from lightning_memkit.utilities.errors import NoEffectWarning

_FIRST_LOOK, _NEXT_LOOK = 12, 4  # measure after 12 batches, then after 4 times as many, ...
_WARM_UP = 2  # batches not measured: they compile, allocate and fill queues


class LoaderTuner(LeavesRunBehind, Callback):
    """Sets the training loader's workers and prefetch from measured times; batches stay the same.

    After 12, 48, 192, ... batches, and between epochs, it compares the time to build a batch with the time to
    train on it, and chooses the fewest workers with which the loop waits for less than `target_stall` of the
    time; that may be none. Their number is limited by the processors that training leaves free (affinity and
    cgroup quota, shared with the machine's other ranks), RAM and shared memory; all ranks use the same plan.
    The loggers get ``loader/stall_fraction``, ``loader/num_workers`` and ``loader/load_ms``.

    It works on `PackedDataModule` and on any ``DataLoader`` of a map-style data set, which then also resumes
    within an epoch on the batch that would have come next. The random numbers that a data set draws depend
    only on the epoch, the batch and the rank, not on the workers; they differ from those drawn without this
    callback. The price: a few clock readings a batch, and a fraction of a millisecond for seeding. With
    `copy_ahead` one more batch is on the device; that part was last verified on GPU on 2026-11-27 (H200, torch 2.11).

    Args:
        target_stall: Fraction of the time that the training loop may wait for data.
        max_workers: The most workers on each rank; null means as many as processors and memory allow.
        copy_ahead: On an accelerator, copy each batch on a stream of its own while the previous one is in
            use; not if `MemoryBudget` or a user's hook expects batches on the host.

    Raises:
        ValueError: An option is out of range.
    """

    watches_only = True
    of_run = {"_undo": list}

    def __init__(
        self, target_stall: float = 0.02, max_workers: int | None = None, copy_ahead: bool = True
    ) -> None:
        if not 0 < target_stall < 1:
            raise ValueError(f"target_stall={target_stall} is outside (0, 1); for 2 % write 0.02.")
        if max_workers is not None and max_workers < 0:
            raise ValueError(f"max_workers={max_workers} is below 0; 0 allows none, null leaves it open.")
        self.target_stall = target_stall
        self.max_workers = max_workers
        self.copy_ahead = copy_ahead
        self._undo: list[Callable[[], None]] = []
        self._saved: dict[str, Any] = {}
        self._reset()

    def __repr__(self) -> str:
        return (
            f"LoaderTuner(target_stall={self.target_stall}, max_workers={self.max_workers}, "
            f"copy_ahead={self.copy_ahead})"
        )

    @property
    def plan(self) -> LoaderPlan:
        """Workers and prefetch of the training loader: the current ones, or the last after training."""
        return LoaderPlan() if self._tuning is None else self._tuning.plan

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Time the loop's waits for data, and take over the training loaders when they are made."""
        if stage != "fit":
            return
        self._reset()
        self._undo = [
            loaders.take_training_loaders(
                trainer, lambda loader: self._take(trainer, loader), ResumableLoader
            ),
            loaders.watch_fetches(trainer, self._times.fetch_begins, self._times.fetch_ends),
        ]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn about loaders that can't be tuned, and about a resume that can't continue within the epoch."""
        self._logged_step = trainer.global_step
        number = len(loaders.training_loaders(trainer))
        if number > 1:
            self._loaders.left.append(f"there are {number} training loaders, and it tunes one")
        if self._loaders.left:
            why = "; ".join(dict.fromkeys(self._loaders.left))
            warnings.warn(
                f"LoaderTuner leaves the workers as they are: {why}. It still logs loader/stall_fraction.",
                NoEffectWarning,
                stacklevel=2,
            )
        begins_again = self._loaders.state_dicts() and not self._loaders.has_resumed
        if begins_again and loaders.is_within_an_epoch(trainer):
            warnings.warn(
                "The checkpoint was saved within an epoch and without LoaderTuner, so the loader begins the epoch "
                "anew: some batches come twice. Resume from a checkpoint at an epoch's end.",
                stacklevel=2,
            )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the loaders again, which Lightning may have replaced, and time the new workers anew."""
        self._loaders.look_again(trainer)
        self._times.begins_anew()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Log when loggers are due; from time to time, revise the plan."""
        every = trainer.log_every_n_steps  # pyright: ignore[reportAttributeAccessIssue]
        if every and trainer.global_step // every != self._logged_step // every:
            self._log(trainer)
        self._batches += 1
        if self._batches >= self._next_look:
            self._next_look *= _NEXT_LOOK
            self._look(trainer, loaders.batches_left(trainer), between_epochs=False)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Revise the plan: workers start anew for the next epoch, so changing their number is free."""
        self._look(trainer, float(trainer.num_training_batches), between_epochs=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log what came since the last entry."""
        if trainer.global_step != self._logged_step:
            self._log(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave validation out of the measured times."""
        self._times.skip()

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save all ranks' positions in this callback's state only; the checkpoint loads without it, too."""
        self._times.skip()
        state = checkpoint.get("callbacks", {}).get(self.state_key, {})
        if state.get("positions"):
            of_ranks = values_of_ranks(LightningRun(trainer), state["positions"])
            state["positions"] = [with_other_ranks(list(states)) for states in zip(*of_ranks, strict=True)]
        stateful = [loader for loader in loaders.training_loaders(trainer) if hasattr(loader, "state_dict")]
        if all(isinstance(loader, ResumableLoader) for loader in stateful):
            loaders.forget_loader_states(checkpoint)

    def state_dict(self) -> dict[str, Any]:
        """The plan and the loaders' positions."""
        if self._tuning is None:
            return dict(self._saved)
        return {**vars(self._tuning.plan), "positions": self._loaders.state_dicts()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the plan and the positions for the loaders that are made next."""
        self._saved = dict(state_dict)
        self._loaders.load(state_dict.get("positions", []))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Undo here, too: Lightning calls no teardown after an error."""
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore Lightning's own loading."""
        self._stop()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the loaders out, which may hold iterators and workers; keep their positions."""
        times = LoadTimes()
        loaders = TrainingLoaders(times, copy_ahead=self.copy_ahead)
        loaders.load(self._loaders.state_dicts())
        return {**super().__getstate__(), "_times": times, "_loaders": loaders}

    def _reset(self) -> None:
        self._times = LoadTimes()
        self._loaders = TrainingLoaders(self._times, copy_ahead=self.copy_ahead)
        self._tuning: LoaderTuning | None = None
        self._batches, self._next_look = 0, _FIRST_LOOK
        self._logged_step, self._said = 0, False

    def _stop(self) -> None:
        for undo in self._undo:
            undo()
        self._loaders.let_go()
        self._undo, self._saved = [], {}

    def _take(self, trainer: Trainer, loader: Any) -> Any:
        taken = self._loaders.take(trainer, loader)
        plan = self._loaders.plan
        if self._tuning is None and plan is not None:
            saved = {name: self._saved[name] for name in vars(plan) if name in self._saved}
            self._tuning = LoaderTuning(LoaderPlan(**saved) if saved else plan, self.target_stall)
        if self._tuning is not None:
            self._loaders.set_workers(trainer, self._tuning.plan)
        return taken

    def _look(self, trainer: Trainer, batches: float, *, between_epochs: bool) -> None:
        """Measure, and change the plan if that pays; all ranks call this at the same batch."""
        if self._tuning is None or self._loaders.left:
            return
        measured, run = self._times.measured(_WARM_UP), LightningRun(trainer)
        if any_rank(run, measured is None) or measured is None:
            return
        measured, bounds = of_all_ranks(
            measured, self._bounds(trainer, measured), lambda values: largest_of_ranks(run, values)
        )
        before = self._tuning.plan
        batches = math.inf if self._loaders.keep_workers else batches
        changed = self._tuning.revise(measured, bounds, batches, between_epochs=between_epochs)
        if changed:
            self._loaders.set_workers(trainer, self._tuning.plan)
            self._times.restart()
        if changed or not self._said:
            self._say(trainer, measured, before)

    def _bounds(self, trainer: Trainer, measured: Measured) -> Bounds:
        assert self._tuning is not None
        ranks = max(1, trainer.num_devices)
        start_seconds, worker_bytes = start_costs(self._loaders.context)
        if self._tuning.plan.num_workers:
            start_seconds = max(0.0, self._times.start_wait - measured.load_seconds)
        most = MOST_WORKERS if self.max_workers is None else self.max_workers
        return Bounds(
            processors=usable_processors() / ranks,
            room=host_room(ranks),
            batch_bytes=self._loaders.batch_bytes,
            worker_bytes=worker_bytes,
            start_seconds=start_seconds,
            most_workers=0 if self._loaders.no_workers else most,
        )

    def _say(self, trainer: Trainer, measured: Measured, before: LoaderPlan) -> None:
        assert self._tuning is not None
        plan, self._said = self._tuning.plan, True
        wanted = f" ({before} before)" if plan != before else ""
        why_none = f" No workers can help: {self._loaders.no_workers}." if self._loaders.no_workers else ""
        info(
            trainer,
            f"LoaderTuner: {plan}{wanted}. A batch took {1000 * measured.load_seconds:.3g} ms to build and "
            f"{1000 * measured.step_seconds:.3g} ms to train on; the loop waited {measured.stall_fraction:.1%} of the "
            f"time.{why_none}",
        )

    def _log(self, trainer: Trainer) -> None:
        self._logged_step = trainer.global_step
        stall = self._times.taken_stall_fraction()
        if stall is None:
            return
        values = {"loader/stall_fraction": stall}
        measured = None if self._tuning is None else self._times.measured()
        if self._tuning is not None and measured is not None:
            values["loader/num_workers"] = float(self._tuning.plan.num_workers)
            values["loader/load_ms"] = 1000 * measured.load_seconds
        for logger in trainer.loggers:
            # Lightning numbers the steps of a module's logged values from 0.
            logger.log_metrics(values, step=trainer.global_step - 1)
