"""How rows become batches: what a user says of it."""

from dataclasses import dataclass

from lightning_memkit.data.loading.host_memory import HostMemory, host_room, parse_room


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """How rows become batches.

    Args:
        num_workers: Processes that build batches ahead. Packing from memory takes microseconds: 0 often does.
        prefetch: Batches that each of them builds ahead.
        host_memory: What batches under way may take of RAM and of shared memory, such as "4GiB"; "auto" takes half
            of what is free. Above it workers hand over parts of a batch.
        drop_last: Leaves out an epoch's last training step if it has fewer rows than the others.
        multiple_of: Rounds a batch's length up to a multiple, never beyond the context.
    """

    num_workers: int = 0
    prefetch: int = 2
    host_memory: str | int = "auto"
    drop_last: bool = False
    multiple_of: int = 1

    def room(self, processes: int) -> HostMemory | None:
        """What batches under way may take where that many processes load; None: without workers none are."""
        return (parse_room(self.host_memory) or host_room(processes)) if self.num_workers > 0 else None
