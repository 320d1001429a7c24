"""The figures of a report in words, shared by tables and pages."""

from lightning_memkit.memory.report import StepReport
from lightning_memkit.memory.units import format_bytes

OUTSIDE = "(the step itself)"
UNMETERED = (
    "It was not metered: what lived is known by its owners, and temporaries are all that the allocator had handed out "
    "besides, saved activations included; on the CPU those are not known."
)
_NO_TIME = 0.005  # fraction of a step's time; less counts as none


def signed(size: int) -> str:
    """Bytes with a sign."""
    return f"{'+' if size > 0 else ''}{format_bytes(size)}"


def difference(before: int, after: int) -> str:
    """The increase in bytes, with a sign; a dash for none."""
    return signed(after - before) if after != before else "-"


def share(part: int, whole: int) -> str:
    """A fraction of the whole as a percentage."""
    return f"{part / max(1, whole):.1%}"


def time_share(more: float) -> str:
    """The relative change of a step's time."""
    return "the same" if abs(more) < _NO_TIME else f"{more:+.0%}"


def flops_words(count: float) -> str:
    """FLOPs in the largest decimal unit that keeps them at 1 or above."""
    for unit, size in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("kFLOP", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} FLOP"


def peak_words(report: StepReport) -> str:
    """Where the peak is: its operator, module and line."""
    anatomy = report.anatomy
    module = f" in {anatomy.peak_module}" if anatomy.peak_module else ""
    place = f", {anatomy.peak_place}" if anatomy.peak_place else ""
    return f"{anatomy.peak_operator}{module}{place}"


def run_words(report: StepReport) -> str:
    """The run in one line."""
    run = report.run
    parts = [f"training batch {run.step}"]
    parts += [f"{run.parameters:,} parameters"] if run.parameters else []
    parts += [f"{report.flops.samples} samples"] if report.flops.samples else []
    parts += [f"{report.flops.tokens:,} tokens"] if report.flops.tokens else []
    parts += [f"micro-batch {run.micro_batch_size}"] if run.micro_batch_size else []
    parts += [f"precision {run.precision}"] if run.precision else []
    parts += [run.device] if run.device else []
    return ", ".join(parts)
