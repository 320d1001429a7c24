"""What a report of a step says, as it is written to JSON and read again."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from lightning_memkit.memory.anatomy import Anatomy
from lightning_memkit.memory.findings import Finding
from lightning_memkit.memory.flops import StepFlops
from lightning_memkit.memory.kinds import SavedBytes
from lightning_memkit.memory.step_meter import MeteredStep
from lightning_memkit.memory.timeline import Timeline
from lightning_memkit.utilities.atomic_write import write_whole

FORMAT = 1
_COMPACT = ("timeline", "modules", "kinds")  # long: an entry a line


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What was run.

    Args:
        name: of the module's class.
        step: the training batch that was metered, from 0.
        device: its name.
        precision: as the Trainer has it.
        parameters: trained and frozen.
        micro_batch_size: samples in a part; 0 where the batch is not split.
        budget_bytes: of a `MemoryBudget`; 0 without one.
        forecast_bytes: the peak that `MemoryBudget` predicted for this micro-batch; 0 where it did not.
        retries: steps that ran out of memory and were taken again.
    """

    name: str = ""
    step: int = 0
    device: str = ""
    precision: str = ""
    parameters: int = 0
    micro_batch_size: int = 0
    budget_bytes: int = 0
    forecast_bytes: int = 0
    retries: int = 0


@dataclass(frozen=True, kw_only=True)
class PredictedStep:
    """What was predicted for the step that was metered.

    Args:
        peak_bytes: of tensors.
        at_peak: by category.
        largest: each category alone, at its own most.
        what: which step it is, where it differs from the metered one, or why there is none.
    """

    peak_bytes: int = 0
    at_peak: dict[str, int] = field(default_factory=dict)
    largest: dict[str, int] = field(default_factory=dict)
    what: str = ""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One change, as the planner predicts it beside the run as it is.

    Args:
        change: what to change.
        saved_bytes: of the peak.
        time_share: of a step's time more (0.01 is 1 %); negative where it is faster.
        changes: what it changes in the numbers; empty where nothing.
        how: the plugin or option, as one writes it.
    """

    change: str
    saved_bytes: int
    time_share: float
    changes: str = ""
    how: str = ""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One step of a run, and what belongs to it.

    Args:
        step: what was metered.
        run: what was run.
        flops: operations of the batch.
        rates: of the last line while training, by the names that loggers have.
        predicted: beside what was measured; None where nothing was.
        advice: what would save memory, the most for the least time first.
        advised: whether advice was asked for.
        failure: the error of a step that ran out of memory; empty where it did not.
        metered: whether operators were counted; else, of a step that failed, what lived is known by its owners only.
    """

    step: MeteredStep
    run: RunFacts = field(default_factory=RunFacts)
    flops: StepFlops = field(default_factory=StepFlops)
    rates: dict[str, float] = field(default_factory=dict)
    predicted: PredictedStep | None = None
    advice: tuple[Advice, ...] = ()
    advised: bool = False
    failure: str = ""
    metered: bool = True

    @property
    def anatomy(self) -> Anatomy:
        """The peak, taken apart."""
        return self.step.anatomy

    def with_findings(self, findings: tuple[Finding, ...]) -> "StepReport":
        """The same with what was wasteful."""
        anatomy = replace(self.anatomy, findings=findings)
        return replace(self, step=replace(self.step, anatomy=anatomy))

    def as_dict(self) -> dict[str, Any]:
        """What the JSON has: the anatomy's fields, and one key for each of the others."""
        found = asdict(self)
        step = found.pop("step")
        anatomy = step.pop("anatomy")
        return {"format": FORMAT, **anatomy, **step, **found}

    def to_json(self, path: Path) -> None:
        """Write the report as JSON; a reader never sees half a file."""
        parts = [f"  {json.dumps(name)}: {_dumped(name, value)}" for name, value in self.as_dict().items()]
        write_whole(path, "{\n" + ",\n".join(parts) + "\n}\n")

    @classmethod
    def from_json(cls, path: Path) -> "StepReport":
        """Read what `to_json` wrote.

        Raises:
            OSError: the file can't be read.
            ValueError: it is no report, or one of another format.
        """
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is no JSON: {error}") from None
        if not isinstance(saved, dict) or "at_peak" not in saved:
            raise ValueError(f"{path} is no report of MemoryReport: it has no `at_peak`.")
        if saved.get("format", FORMAT) != FORMAT:
            raise ValueError(
                f"{path} has the format {saved['format']}, and this memkit reads {FORMAT}: "
                "use the version that wrote it."
            )
        try:
            return _report(saved)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} is no report that memkit can read: {error}") from None


def _dumped(name: str, value: Any) -> str:
    if name in _COMPACT and isinstance(value, dict):
        lines = [
            f"    {json.dumps(key)}: {json.dumps(one, separators=(',', ':'))}" for key, one in value.items()
        ]
        return "{\n" + ",\n".join(lines) + "\n  }"
    return json.dumps(value, indent=2).replace("\n", "\n  ")


def _report(saved: Mapping[str, Any]) -> StepReport:
    anatomy = _of(
        Anatomy, {**saved, "findings": tuple(_of(Finding, one) for one in saved.get("findings", ()))}
    )
    step = MeteredStep(
        anatomy=anatomy,
        timeline=_timeline(saved.get("timeline") or {}),
        kinds={name: _of(SavedBytes, one) for name, one in (saved.get("kinds") or {}).items()},
        modules={name: _of(SavedBytes, one) for name, one in (saved.get("modules") or {}).items()},
    )
    predicted = saved.get("predicted")
    return StepReport(
        step=step,
        run=_of(RunFacts, saved.get("run") or {}),
        flops=_of(StepFlops, saved.get("flops") or {}),
        rates=dict(saved.get("rates") or {}),
        predicted=None if predicted is None else _of(PredictedStep, predicted),
        advice=tuple(_of(Advice, one) for one in saved.get("advice", ())),
        advised=bool(saved.get("advised", False)),
        failure=str(saved.get("failure", "")),
        metered=bool(saved.get("metered", True)),
    )


def _timeline(saved: Mapping[str, Any]) -> Timeline:
    lists = {name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()}
    lists["category_bytes"] = {name: tuple(one) for name, one in saved.get("category_bytes", {}).items()}
    lists["phases"] = tuple((phase, index) for phase, index in saved.get("phases", ()))
    return _of(Timeline, lists)


def _of(kind: Any, values: Mapping[str, Any]) -> Any:
    """A dataclass of the keys that it knows: a later version may write more."""
    known = {one.name for one in fields(kind)}
    return kind(**{name: value for name, value in values.items() if name in known})
