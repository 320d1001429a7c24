"""The user's options for building batches from rows."""

from dataclasses import dataclass

from lightning_memkit.data.batching.collate import rounded_length
from lightning_memkit.data.loading.host_memory import HostMemory, host_room, parse_room
from lightning_memkit.utilities.given import refuse_no_number, refuse_no_truth


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """How rows become batches.

    Args:
        num_workers: Processes that build batches ahead. Packing from memory takes microseconds, so 0 is often
            enough.
        prefetch: Batches that each worker builds ahead.
        host_memory: The most RAM and shared memory for batches under way, such as "4GiB"; "auto" takes half
            of what is free. If batches would exceed it, workers send parts of a batch.
        drop_last: Drops an epoch's last training step if it has fewer rows than the others.
        multiple_of: Rounds a batch's length up to a multiple, never beyond the context.
    """

    num_workers: int = 0
    prefetch: int = 2
    host_memory: str | int = "auto"
    drop_last: bool = False
    multiple_of: int = 1

    def __post_init__(self) -> None:
        for name in ("num_workers", "prefetch", "multiple_of"):
            refuse_no_number(name, getattr(self, name))
        refuse_no_truth("drop_last", self.drop_last)
        rounded_length(1, 1, self.multiple_of)
        try:
            parse_room(self.host_memory)
        except ValueError as error:
            raise ValueError(f"host_memory: {error}") from None

    def room(self, processes: int) -> HostMemory | None:
        """The memory for batches under way if this many processes load; None without workers, which need none."""
        return (parse_room(self.host_memory) or host_room(processes)) if self.num_workers > 0 else None
