"""Where every byte of a step went: the peak by category."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from torch import Tensor

from lightning_memkit.memory.findings import Finding
from lightning_memkit.memory.meter import Allocation, ByteMeter, Phase
from lightning_memkit.utilities.atomic_write import write_whole

CATEGORIES = {
    "weights": "parameters and buffers",
    "gradients": "p.grad",
    "optimizer_states": "moments",
    "compensation": "the bits of the weights that bfloat16 lacks",
    "communication": "weights gathered from other ranks, gradients on their way to them",
    "saved_activations": "kept by the forward for the backward",
    "temporaries": "freed again within the phase that made them",
    "inputs": "the batch",
    "other": "made before the step and named by none of the above",
}


_LASTING = ("weights", "optimizer_states", "compensation")


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """The peak of one metered step, by category.

    Args:
        peak_bytes: the most bytes of tensors that were alive at once.
        peak_phase: the phase of the peak: `"forward"`, `"backward"` or `"optimizer"`.
        peak_operator: the operator whose output made the peak.
        peak_module: the module that ran it; empty if unknown, or outside of any.
        peak_place: `file:line` of the code that called it, if known.
        at_peak: bytes alive at the peak by category (keys of `CATEGORIES`); they sum to `peak_bytes`.
        largest: each category's own peak, at any moment of the step.
        fixed_bytes: memory outside the tensors and outside the budget: on CUDA what the driver counts besides
            the allocator; on CPU the process before training (interpreter and libraries).
        operators: how many operators the step dispatched.
        findings: what was wasteful in the step, or stayed after it.
    """

    peak_bytes: int
    peak_phase: Phase
    peak_operator: str
    at_peak: dict[str, int] = field(default_factory=dict)
    largest: dict[str, int] = field(default_factory=dict)
    fixed_bytes: int = 0
    operators: int = 0
    findings: tuple[Finding, ...] = ()
    peak_module: str = ""
    peak_place: str = ""

    def to_json(self, path: Path) -> None:
        """Write the anatomy as JSON; a reader never sees half a file."""
        write_whole(path, json.dumps(asdict(self), indent=2) + "\n")


class AnatomyMeter(ByteMeter):
    """A `ByteMeter` that records the phases of a step and splits its peak by category.

    Use: `track` existing tensors, enter, set `phase` as the step proceeds, leave, then `dissect`.
    """

    def __init__(self) -> None:
        super().__init__(record=True)

    def end_forward(self) -> None:
        """Mark the end of a forward: allocations of it that are still alive are saved for the backward."""
        for record in self.records:
            if record.category is None and record.phase == "forward" and record.died is None:
                record.category = "saved_activations"
        self.phase = "backward"

    def dissect(
        self,
        *,
        gradients: Iterable[Tensor],
        optimizer_states: Iterable[Tensor],
        fixed_bytes: int = 0,
    ) -> Anatomy:
        """The anatomy of the metered step.

        Args:
            gradients: the gradients after the step.
            optimizer_states: the optimizer's tensors after the step.
            fixed_bytes: see `Anatomy`.
        """
        self.track(optimizer_states, "optimizer_states")
        self.track(gradients, "gradients")
        for record in self.records:
            if record.category is None:
                record.category = "other" if record.phase == "outside" else "temporaries"
        found = anatomy_at(self.records, self.peak_tick, fixed_bytes=fixed_bytes, operators=self.operators)
        return replace(
            found,
            peak_bytes=self.peak_bytes,
            peak_operator=self.peak_operator,
            peak_module=self.peak_origin,
        )


def anatomy_at(records: list[Allocation], tick: int, *, fixed_bytes: int = 0, operators: int = 0) -> Anatomy:
    """What was alive at a given moment, by category; all records must have their categories."""
    alive = [record for record in records if record.alive_at(tick)]
    return Anatomy(
        peak_bytes=sum(record.size_bytes for record in alive),
        peak_phase=_phase_at(records, tick),
        peak_operator="",
        at_peak=_bytes_by_category(alive),
        largest=_largest_by_category(records),
        fixed_bytes=fixed_bytes,
        operators=operators,
    )


def lasting_bytes(records: Iterable[Allocation]) -> dict[str, int]:
    """Bytes by category of what outlives a step: weights, optimizer states and compensation that are still alive."""
    found = _bytes_by_category(record for record in records if record.died is None)
    return {category: found[category] for category in _LASTING}


def _bytes_by_category(records: Iterable[Allocation]) -> dict[str, int]:
    total = dict.fromkeys(CATEGORIES, 0)
    for record in records:
        total[record.category or "other"] += record.size_bytes
    return total


def _largest_by_category(records: list[Allocation]) -> dict[str, int]:
    changes: list[tuple[int, int, str]] = []
    for record in records:
        category = record.category or "other"
        changes.append((record.born, record.size_bytes, category))
        if record.died is not None:
            changes.append((record.died, -record.size_bytes, category))
    largest, live = dict.fromkeys(CATEGORIES, 0), dict.fromkeys(CATEGORIES, 0)
    for _, change, category in sorted(changes):
        live[category] += change
        largest[category] = max(largest[category], live[category])
    return largest


def _phase_at(records: list[Allocation], tick: int) -> Phase:
    """The phase of the last allocation up to a tick."""
    before = [record for record in records if record.born <= tick]
    return max(before, key=lambda record: record.born).phase if before else "outside"
