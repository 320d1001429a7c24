"""The contents of a step's report, and how they are written to JSON and read back."""

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
_COMPACT = ("timeline", "modules", "kinds")  # long, so written with one entry a line


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The run that a report is about.

    Args:
        name: the module's class.
        step: the training batch that was metered, from 0.
        device: the device's name.
        precision: the Trainer's precision.
        parameters: the number of parameters, trained and frozen.
        micro_batch_size: samples in a micro-batch; 0 if the batch is not split.
        budget_bytes: the budget of a `MemoryBudget`; 0 without one.
        forecast_bytes: the peak that `MemoryBudget` predicted for this micro-batch; 0 if it did not.
        retries: steps that ran out of memory and were retried.
        recomputes: whether activations are recomputed.
        offloads: whether the optimizer's states are in host memory.
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
    recomputes: bool = False
    offloads: bool = False


@dataclass(frozen=True, kw_only=True)
class PredictedStep:
    """The prediction of the metered step.

    Args:
        peak_bytes: the peak of tensors.
        at_peak: bytes at the peak by category.
        largest: each category's own peak.
        what: which step was predicted, if not the metered one, or why there is no prediction.
    """

    peak_bytes: int = 0
    at_peak: dict[str, int] = field(default_factory=dict)
    largest: dict[str, int] = field(default_factory=dict)
    what: str = ""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One change to the run, as the planner predicts it.

    Args:
        change: what to change.
        saved_bytes: how much lower the peak is.
        time_share: relative change of a step's time (0.01 is 1 % slower); negative if it is faster.
        changes: what changes numerically; empty if nothing.
        how: the plugin or option to write.
    """

    change: str
    saved_bytes: int
    time_share: float
    changes: str = ""
    how: str = ""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """The report of one step of a run.

    Args:
        step: what was metered.
        run: facts about the run.
        flops: FLOPs of the batch.
        rates: of the last line while training, by the names that loggers use.
        predicted: the prediction; None if there was none.
        advice: changes that would save memory, best ratio of savings to time first.
        advised: whether advice was requested.
        failure: the error of a step that ran out of memory; empty if it did not.
        metered: whether operators were counted; if not, live memory of a failed step is known only by owner.
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
        """The anatomy of the peak."""
        return self.step.anatomy

    def with_findings(self, findings: tuple[Finding, ...]) -> "StepReport":
        """A copy with these findings."""
        anatomy = replace(self.anatomy, findings=findings)
        return replace(self, step=replace(self.step, anatomy=anatomy))

    def as_dict(self) -> dict[str, Any]:
        """The contents of the JSON: the anatomy's fields, and one key for each other attribute."""
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
            ValueError: it is no report, or has another format.
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
    lists["largest_modules"] = tuple(
        tuple((module, size) for module, size in found) for found in saved.get("largest_modules", ())
    )
    lists["phases"] = tuple((phase, index) for phase, index in saved.get("phases", ()))
    return _of(Timeline, lists)


def _of(kind: Any, values: Mapping[str, Any]) -> Any:
    """Make a dataclass from the keys that it knows, since later versions may write more."""
    known = {one.name for one in fields(kind)}
    return kind(**{name: value for name, value in values.items() if name in known})
