"""The training loaders of a fit, as `LoaderTuner` takes them over: with other workers, positions, copies ahead."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_memkit.data.loading.copy_ahead import copied_ahead, copies_help
from lightning_memkit.data.loading.host_memory import host_room
from lightning_memkit.data.loading.load_times import LoadTimes
from lightning_memkit.data.loading.loader import PackedLoader
from lightning_memkit.data.loading.loader_tuning import LoaderPlan, why_no_workers
from lightning_memkit.data.loading.resumable_loader import ResumableLoader, why_not_resumable
from lightning_memkit.data.loading.stream_loader import StreamLoader
from lightning_memkit.plugins.asked import budget_of
from lightning_memkit.plugins.seams import loaders
from lightning_memkit.utilities.tensors import tensors_of

Taken = PackedLoader | ResumableLoader


class TrainingLoaders:
    """Takes loaders over, and holds what is known of them.

    Args:
        times: Learn how long workers build.
        copy_ahead: Whether batches are to be copied to an accelerator one batch ahead.

    Attributes:
        taken: Those whose workers can be set.
        left: Why others can't.
        positions: That the next loaders are to go on from.
        has_resumed: One of them did.
        no_workers: Why workers can't build for them; None where they can.
        batch_bytes: Of the largest batch so far.
    """

    def __init__(self, times: LoadTimes, *, copy_ahead: bool) -> None:
        self.taken: list[Taken] = []
        self.left: list[str] = []
        self.positions: list[Any] = []
        self.has_resumed = False
        self.no_workers: str | None = None
        self.batch_bytes = 0
        self._times, self._copy_ahead = times, copy_ahead

    def take(self, trainer: Trainer, loader: Any) -> Any:
        """The loader to train from in the place of one that Lightning has prepared."""
        if not isinstance(loader, (PackedLoader, ResumableLoader)):
            reason = _why_left(loader)
            if reason is not None:
                self.left.append(reason)
                return loader
            loader = ResumableLoader(loader, rank=trainer.global_rank, ranks=trainer.world_size)
        self._resume(loader)
        if isinstance(loader, ResumableLoader):
            loader.set_pin_memory(_is_accelerator(trainer.strategy.root_device))
            self.no_workers = why_no_workers(loader.built, loader.multiprocessing_context)
        else:
            self.no_workers = why_no_workers(loader.rows)
            loader.keeps_workers = True
        loader.times = self._times
        loader.on_the_way = self._on_the_way(trainer)
        self.taken.append(loader)
        return loader

    def look_again(self, trainer: Trainer) -> None:
        """Lightning may have made others, and know only now where it ends an epoch (limit_train_batches)."""
        present = loaders.training_loaders(trainer)
        self.taken = [loader for loader in present if isinstance(loader, (PackedLoader, ResumableLoader))]
        for loader in self.taken:
            if isinstance(loader, ResumableLoader):
                loader.epoch_batches = trainer.num_training_batches

    def set_workers(self, trainer: Trainer, plan: LoaderPlan) -> None:
        """From the next batch on."""
        room = host_room(max(1, trainer.num_devices))
        for loader in self.taken:
            loader.set_workers(plan.num_workers, plan.prefetch, room)

    @property
    def plan(self) -> LoaderPlan | None:
        """What the loaders themselves say; None without any."""
        for loader in self.taken:
            if isinstance(loader, ResumableLoader):
                return LoaderPlan(num_workers=loader.num_workers, prefetch=loader.prefetch_factor or 2)
            return LoaderPlan(num_workers=loader.options.num_workers, prefetch=loader.options.prefetch)
        return None

    @property
    def keep_workers(self) -> bool:
        """Whether workers stay from one epoch to the next, so that starting them pays over all of these."""
        return all(isinstance(one, PackedLoader) or one.persistent_workers for one in self.taken)

    @property
    def context(self) -> Any:
        """How the processes of the loaders start; None: as Python says."""
        return next((getattr(loader, "multiprocessing_context", None) for loader in self.taken), None)

    def state_dicts(self) -> list[Any]:
        """Where they stand, but for those whose datamodule says so; where they will begin, before they are made."""
        if not self.taken:
            return list(self.positions)
        return [loader.state_dict() for loader in self.taken if isinstance(loader, ResumableLoader)]

    def load(self, positions: list[Any]) -> None:
        """Go on from there: loaders that are made already, where a strategy loads late, and those to come."""
        self.positions = list(positions)
        for loader in self.taken:
            self._resume(loader)

    def let_go(self) -> None:
        """Training is over: a loader may be the user's own object."""
        for loader in self.taken:
            loader.times, loader.on_the_way = None, iter
            if isinstance(loader, PackedLoader):
                loader.keeps_workers = False
                loader.close()

    def _resume(self, loader: Taken) -> None:
        if self.positions and isinstance(loader, ResumableLoader):
            loader.load_state_dict(self.positions.pop(0))
            self.has_resumed = True

    def _on_the_way(self, trainer: Trainer) -> Callable[[Iterator[Any]], Iterator[Any]]:
        """What batches pass between the loader and Lightning."""
        device = trainer.strategy.root_device
        if not self._copy_ahead or budget_of(trainer) or not _is_accelerator(device):
            return self._weighed
        hooks = loaders.transfer_hooks(trainer)
        if hooks:
            rank_zero_info(f"LoaderTuner copies no batch ahead: {', '.join(hooks)} gets batches on the host.")
            return self._weighed
        ahead = copied_ahead(device)
        return lambda batches: ahead(self._weighed(batches))

    def _weighed(self, batches: Iterator[Any]) -> Iterator[Any]:
        return map(self._weigh, batches)  # a generator would hold each batch until the next one has come

    def _weigh(self, batch: Any) -> Any:
        tensors = list(tensors_of(batch))
        self.batch_bytes = max(self.batch_bytes, sum(tensor.nbytes for tensor in tensors))
        device = next((tensor.device.type for tensor in tensors if tensor.device.type != "cpu"), None)
        if device is not None:
            self.no_workers = f"the data set gives tensors on {device}, which workers can't hand over"
        return batch


def _why_left(loader: Any) -> str | None:
    if isinstance(loader, StreamLoader):
        return "a stream is read by one thread, which `batches: {num_workers: 1, prefetch: ...}` of its module sets"
    return why_not_resumable(loader)


def _is_accelerator(device: torch.device) -> bool:
    """Whether it is the accelerator that torch pins host memory for."""
    if not copies_help(device) or not torch.accelerator.is_available():
        return False
    present = torch.accelerator.current_accelerator()
    return present is not None and present.type == device.type
