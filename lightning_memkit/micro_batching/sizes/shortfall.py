"""The error text for a budget that is too small: by how much, what needs the bytes, and what would help."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_memkit.memory.sizing import Trial
from lightning_memkit.memory.units import format_bytes
from lightning_memkit.micro_batching.proof.optimizer_trial import states_on
from lightning_memkit.micro_batching.run import Step


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What one micro-batch needs, in bytes.

    Args:
        weights: all parameters.
        gradients: all gradients, in the dtype in which they are accumulated.
        states: the optimizer's states.
        part_peak: the peak of forward and backward; None if the device ran out of memory.
        step_peak: the peak of the optimizer's step.
        float32: whether trained weights are float32.
        checkpointed: whether activation checkpointing is in use already.
        fusable: whether the optimizer's class has a `fused` option that is off.
        offloadable: whether states are on an accelerator and could be in host memory.
        what: what needs them, if not a micro-batch or a whole batch.
    """

    weights: int
    gradients: int
    states: int
    part_peak: int | None
    step_peak: int
    float32: bool
    checkpointed: bool
    fusable: bool = False
    offloadable: bool = False
    what: str = ""

    @classmethod
    def measured(cls, step: Step, *, part_peak: int | None, step_peak: int, states: list[Tensor]) -> "Needs":
        """The needs of a step from its measured peaks."""
        parameters = list(step.run.module.parameters())
        trained = [p for p in parameters if p.requires_grad]
        return cls(
            weights=sum(p.numel() * p.itemsize for p in parameters),
            gradients=sum(p.numel() * (getattr(p, "grad_dtype", None) or p.dtype).itemsize for p in trained),
            states=sum(state.numel() * state.itemsize for state in states),
            part_peak=part_peak,
            step_peak=step_peak,
            float32=any(p.dtype == torch.float32 for p in trained),
            checkpointed=step.run.recomputes_activations,
            fusable=step.optimizer.defaults.get("fused", True) is not True,
            offloadable=step.run.device.type != "cpu" and not step.run.offloads_states,
        )

    @property
    def kept(self) -> int:
        """The bytes that are alive in every phase."""
        return self.weights + self.gradients + self.states

    @property
    def peak(self) -> int:
        """The larger of the phases' peaks."""
        return max(self.part_peak or self.kept, self.step_peak)

    def saved_by(self, *, kept: int = 0, activations: int = 0, temporaries: int = 0) -> int:
        """By how much the peak falls if kept bytes, activations and temporaries shrink by so much."""
        part, step = self.part_peak or self.kept, max(self.step_peak, self.kept)
        return self.peak - max(part - kept - activations, step - kept - temporaries)


def shortfall(
    needs: Needs, size: int | None, usable: int, headroom: float = 0.05, predicted: str = ""
) -> str:
    """The error text: by how much a micro-batch of `size` exceeds the usable bytes, why, and the remedies.

    A `size` of None is a batch that can't be split. `predicted` says which configurations were predicted to fit.
    """
    what = needs.what or ("The whole batch" if size is None else f"A micro-batch of {size}")
    kept = (
        f"weights {format_bytes(needs.weights)}, gradients {format_bytes(needs.gradients)}, optimizer states "
        f"{format_bytes(needs.states)}"
    )
    if needs.part_peak is None:
        head = f"{what} runs out of memory on the device itself, besides {kept}."
    else:
        peak = max(needs.part_peak, needs.step_peak)
        where = "the optimizer's step" if needs.step_peak > needs.part_peak else "forward and backward"
        rest = max(0, peak - needs.kept)
        head = (
            f"{what} needs {format_bytes(peak)} at its peak, {format_bytes(peak - usable)} more "
            f"than the budget's usable {format_bytes(usable)}: {kept}, and {format_bytes(rest)} of activations, "
            f"inputs and temporaries in {where}."
        )
    remedies = _remedies(needs)
    smaller = ['a smaller micro_batch_size, or "auto"'] if size is not None and size > 1 else []
    larger = [] if needs.part_peak is None else [_larger_budget(needs, headroom)]
    fits = f" {predicted}" if predicted else ""
    return f"{head}{fits} What would help: {'; '.join([*smaller, *remedies, *larger])}."


def ran_dry(step: Step, phase: str, failure: str, smallest: Trial | None, unsplittable: str = "") -> str:
    """The error text if even micro-batches of one sample run out of memory: peak, phase and three remedies.

    Args:
        step: the step that failed; its state is restored.
        phase: the phase in which it failed.
        failure: the allocator's message.
        smallest: the smallest size whose peak was measured before step 1.
        unsplittable: why the batch can't be split; empty if it can.
    """
    if unsplittable:
        return f"Batch {step.batch_idx} runs out of memory {phase} ({failure}) and can't be split. {unsplittable}"
    device = step.run.device
    if device.type == "cuda":
        peak, known = torch.cuda.max_memory_reserved(device), "the allocator's peak was"
    else:
        peak = smallest.peak_bytes if smallest is not None else None
        known = f"before step 1 the peak of {smallest.micro_batch_size} was" if smallest is not None else ""
    states = states_on(device, step.optimizer)
    needs = Needs.measured(step, part_peak=peak, step_peak=0, states=states)
    known = f"; {known} {format_bytes(peak)}" if peak else ""
    remedies = "; ".join(_remedies(needs)[:3]) or "shorter samples, or a larger budget"
    return (
        f"A micro-batch of 1 runs out of memory at batch {step.batch_idx} {phase} ({failure}){known}: weights "
        f"{format_bytes(needs.weights)}, gradients {format_bytes(needs.gradients)}, optimizer states "
        f"{format_bytes(needs.states)}. No smaller micro-batch is possible. What would help: {remedies}."
    )


def _larger_budget(needs: Needs, headroom: float) -> str:
    enough = needs.peak / (1 - headroom)
    return (
        f'budget="{-(-enough // 2**20):.0f}MiB"'
        if enough >= 2**20
        else f'budget="{-(-enough // 2**10):.0f}KiB"'
    )


def _remedies(needs: Needs) -> list[str]:
    """Remedies with the most bytes by which each can lower the peak, the largest first."""
    activations = max(0, (needs.part_peak or 0) - needs.kept)
    temporaries = max(0, needs.step_peak - needs.kept)
    saved = {
        "an 8-bit optimizer (bitsandbytes.optim.AdamW8bit)": needs.saved_by(kept=needs.states * 7 // 10),
    }
    if needs.float32:
        # Per parameter: moments shrink from 8 to 4 bytes, compensation adds 2, weights shrink by 2.
        saved["PureBF16Precision (weights, states and activations in bf16)"] = needs.saved_by(
            kept=needs.states // 2, activations=activations // 2, temporaries=temporaries // 2
        )
    if not needs.checkpointed:
        saved["ActivationCheckpointing (recomputes activations)"] = needs.saved_by(activations=activations)
    if needs.fusable:
        saved["the optimizer's one-kernel step (fused=True)"] = needs.saved_by(temporaries=temporaries)
    if needs.offloadable:
        saved["OptimizerOffload (states in host memory)"] = needs.saved_by(kept=needs.states)
    ranked = sorted(saved.items(), key=lambda item: -item[1])
    return [f"{name}: up to {format_bytes(count)}" for name, count in ranked if count > 0]
