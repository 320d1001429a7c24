"""The training loaders of a fit while `LoaderTuner` controls their workers, positions and copies ahead."""

from collections.abc import Callable, Iterator
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_memkit.data.loading.copy_ahead import copied_ahead, pinning_helps
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
    """Takes over the training loaders and holds what is known about them.

    Args:
        times: Records how long workers take to build batches.
        copy_ahead: Whether batches are copied to an accelerator one batch ahead.

    Attributes:
        taken: Loaders whose workers can be set.
        left: The reasons why other loaders can't be tuned.
        positions: Saved positions from which the next loaders resume.
        has_resumed: Whether a loader has resumed from a position.
        no_workers: Why workers can't build batches for these loaders; None if they can.
        batch_bytes: The size of the largest batch so far.
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
        """Replace a loader that Lightning has prepared by a tunable one; return it if it can't be tuned."""
        if not isinstance(loader, (PackedLoader, ResumableLoader)):
            reason = _why_left(loader)
            if reason is not None:
                self.left.append(reason)
                return loader
            loader = ResumableLoader(loader, rank=trainer.global_rank, ranks=trainer.world_size)
        self._resume(loader)
        if isinstance(loader, ResumableLoader):
            loader.set_pin_memory(pinning_helps(trainer.strategy.root_device))
            self.no_workers = why_no_workers(loader.built, loader.multiprocessing_context)
        else:
            self.no_workers = why_no_workers(loader.rows)
            loader.keeps_workers = True
        loader.times = self._times
        loader.on_the_way = self._on_the_way(trainer)
        self.taken.append(loader)
        return loader

    def look_again(self, trainer: Trainer) -> None:
        """Find the loaders that Lightning uses now, and tell them where it ends an epoch."""
        present = loaders.training_loaders(trainer)
        self.taken = [loader for loader in present if isinstance(loader, (PackedLoader, ResumableLoader))]
        for loader in self.taken:
            if isinstance(loader, ResumableLoader):
                loader.epoch_batches = trainer.num_training_batches

    def set_workers(self, trainer: Trainer, plan: LoaderPlan) -> None:
        """Use a plan's workers and prefetch from the next batch on."""
        room = host_room(max(1, trainer.num_devices))
        for loader in self.taken:
            loader.set_workers(plan.num_workers, plan.prefetch, room)

    @property
    def plan(self) -> LoaderPlan | None:
        """The loaders' own workers and prefetch; None if no loader was taken."""
        for loader in self.taken:
            if isinstance(loader, ResumableLoader):
                return LoaderPlan(num_workers=loader.num_workers, prefetch=loader.prefetch_factor or 2)
            return LoaderPlan(num_workers=loader.options.num_workers, prefetch=loader.options.prefetch)
        return None

    @property
    def keep_workers(self) -> bool:
        """Whether workers outlive epochs, so that the cost of starting them spreads over all epochs."""
        return all(isinstance(one, PackedLoader) or one.persistent_workers for one in self.taken)

    @property
    def context(self) -> Any:
        """The multiprocessing context of the loaders; None for Python's default."""
        return next((getattr(loader, "multiprocessing_context", None) for loader in self.taken), None)

    def state_dicts(self) -> list[Any]:
        """The loaders' positions, except those a datamodule saves; until loaders exist, the restored ones."""
        if not self.taken:
            return list(self.positions)
        return [loader.state_dict() for loader in self.taken if isinstance(loader, ResumableLoader)]

    def load(self, positions: list[Any]) -> None:
        """Resume from positions: loaders that exist already (some strategies load late), or later ones."""
        self.positions = list(positions)
        for loader in self.taken:
            self._resume(loader)

    def let_go(self) -> None:
        """Release the loaders after training: one may be the user's own object."""
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
        """The transformation of the batches between the loader and Lightning."""
        device = trainer.strategy.root_device
        if not self._copy_ahead or budget_of(trainer) or not pinning_helps(device):
            return self._weighed
        hooks = loaders.transfer_hooks(trainer)
        if hooks:
            rank_zero_info(f"LoaderTuner copies no batch ahead: {', '.join(hooks)} gets batches on the host.")
            return self._weighed
        ahead = copied_ahead(device)
        return lambda batches: ahead(self._weighed(batches))

    def _weighed(self, batches: Iterator[Any]) -> Iterator[Any]:
        return map(self._weigh, batches)  # a generator would keep each batch alive too long

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
