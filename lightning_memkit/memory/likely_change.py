"""The plugin that would lower a peak most, judged by the categories that make it up; nothing is predicted."""

from collections.abc import Iterator

from lightning_memkit.memory.kinds import alike
from lightning_memkit.memory.report import StepReport
from lightning_memkit.memory.units import format_bytes

_LEAST = 0.05  # fraction of the peak; less is not worth a line
_FULL = ("32-true", "32", "64-true")  # Lightning's names of precisions in which activations are float32, too


def likely_change(report: StepReport) -> str:
    """The change that may save most at this peak, with its price; empty if none may save a twentieth of it."""
    found = max(_changes(report), default=(0, ""))
    return found[1] if found[0] > _LEAST * report.anatomy.peak_bytes else ""


def _changes(report: StepReport) -> Iterator[tuple[int, str]]:
    """What a change saves at most, and its words."""
    run, at_peak = report.run, report.anatomy.at_peak
    activations, states = at_peak.get("saved_activations", 0), at_peak.get("optimizer_states", 0)
    repeats = any(count > 1 for count, _ in alike(report.step.modules).values())
    if repeats and not run.recomputes:
        yield _said("ActivationCheckpointing()", activations, "a second forward")
    if "true" not in run.precision or run.precision in _FULL:
        # Gradients and states halve, compensation takes what the weights save; float32 activations halve.
        halved = (at_peak.get("gradients", 0) + states) // 2
        halved += activations // 2 if run.precision in _FULL else 0
        yield _said("PureBF16Precision()", halved, "bfloat16's rounding")
    if not run.offloads and run.device not in ("", "cpu"):
        yield _said("OptimizerOffload()", states, "copies at every step")
    rows = run.micro_batch_size or report.flops.samples
    if rows > 1:
        ours = (activations + at_peak.get("temporaries", 0)) // 2
        yield _said(f"MemoryBudget(micro_batch_size={rows // 2})", ours, "smaller kernels")


def _said(plugin: str, most: int, price: str) -> tuple[int, str]:
    return most, f"{plugin}: up to -{format_bytes(most)}, for {price}"
