"""The result of a prediction."""

from dataclasses import dataclass, field

from lightning_memkit.memory.anatomy import CATEGORIES, Anatomy
from lightning_memkit.memory.units import format_bytes
from lightning_memkit.prediction.work import Work

_SHOWN = 5  # modules in the printed form


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The memory that training steps will take.

    Attributes:
        anatomy: the peak, its phase and operator, and the bytes of each category at it.
        phases: the peak of forward, backward and optimizer step, each including all that is alive then.
        peak_module: the module in which the peak occurs; empty outside of any.
        modules: bytes alive at the peak by the module that made them (weights and batch belong to none).
        saved: bytes of saved activations at the peak, by module.
        assumed: assumptions about values that only training knows, with the line that needed each first.
        device: the device whose kernels and allocator were assumed.
        ranks: how many ranks train; the figures are those of the rank that holds the most.
        allocated_bytes: on a GPU, the most that the caching allocator would allocate
            (``max_memory_allocated``): tensors in units of 512 bytes, and the matrix library's workspaces. On
            the CPU 0.
        reserved_bytes: on a GPU, the most that the caching allocator would reserve (``max_memory_reserved``),
            without the context (`anatomy.fixed_bytes`). On the CPU 0.
        library_bytes: on a GPU, the matrix library's workspaces, included in both: one for the forward's
            thread, one for the backward's.
        expandable_bytes: `reserved_bytes` with ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``.
        host_bytes: the most host memory that offloads take; pinned by default, and then in powers of two, as
            torch's allocator of pinned memory gives it.
        offloaded_bytes: the most bytes of offloaded tensors themselves, without rounding.
        offloaded_apart_bytes: the same without what FSDP2 offloads.
        copied_bytes: what FSDP2's CPU offload copies in a micro-batch: shards to the device each time that they are
            gathered, and reduced gradients to the host.
        lasting: bytes of weights, optimizer states and compensation on the device after the last step.
        timeline: bytes alive at each operator of the steps, including its workspace.
        work: what the operators of a micro-batch and of an optimizer step compute and move.
    """

    anatomy: Anatomy
    phases: dict[str, int] = field(default_factory=dict)
    peak_module: str = ""
    modules: dict[str, int] = field(default_factory=dict)
    saved: dict[str, int] = field(default_factory=dict)
    assumed: dict[str, str] = field(default_factory=dict)
    device: str = "cpu"
    ranks: int = 1
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    library_bytes: int = 0
    expandable_bytes: int = 0
    host_bytes: int = 0
    offloaded_bytes: int = 0
    offloaded_apart_bytes: int = 0
    copied_bytes: int = 0
    lasting: dict[str, int] = field(default_factory=dict, repr=False)
    timeline: tuple[int, ...] = field(default=(), repr=False)
    work: Work = field(default_factory=Work, repr=False)

    @property
    def peak_bytes(self) -> int:
        """The most bytes of tensors alive at once."""
        return self.anatomy.peak_bytes

    @property
    def total_bytes(self) -> int:
        """What the device must provide: on a GPU the reserved bytes and the context."""
        return (self.reserved_bytes or self.peak_bytes) + self.anatomy.fixed_bytes

    def __str__(self) -> str:
        anatomy = self.anatomy
        where = f" ({self.peak_module})" if self.peak_module else ""
        on = "" if self.device == "cpu" else f" on {self.device}"
        on += f" per rank, of {self.ranks}," if self.ranks > 1 else ""
        lines = [
            f"Peak {format_bytes(self.peak_bytes)}{on} in the {anatomy.peak_phase}, at {anatomy.peak_operator}{where}"
        ]
        for category, meaning in CATEGORIES.items():
            size = anatomy.at_peak.get(category, 0)
            if size:
                lines.append(f"  {category.replace('_', ' '):<18}{format_bytes(size):>12}  {meaning}")
        lines.append(
            "Phases: " + ", ".join(f"{phase} {format_bytes(size)}" for phase, size in self.phases.items())
        )
        if self.reserved_bytes:
            lines.append(
                f"Reserved: {format_bytes(self.reserved_bytes)} ({format_bytes(self.expandable_bytes)} with "
                f"expandable segments), of which {format_bytes(self.library_bytes)} are the matrix library's, beside "
                f"{format_bytes(anatomy.fixed_bytes)} of context"
            )
        if self.host_bytes:
            lines.append(
                f"Host: {format_bytes(self.host_bytes)} for {format_bytes(self.offloaded_bytes)} offloaded"
            )
        largest = [f"{name or '(no module)'} {format_bytes(size)}" for name, size in self.saved.items()]
        if largest:
            lines.append("Saved by: " + ", ".join(largest[:_SHOWN]))
        lines += [f"Assumed: {what} (asked at {where})" for what, where in self.assumed.items()]
        return "\n".join(lines)
