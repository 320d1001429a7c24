"""Predict the run's own step, and that step with each single change that may save memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning_memkit.memory.report import Advice, PredictedStep
from lightning_memkit.planning import choices
from lightning_memkit.planning.choices import Choice, Family, PluginSpec, refusal
from lightning_memkit.planning.problem import Problem, Row, UnavailableError
from lightning_memkit.planning.times import TimesByRates, TimesHere
from lightning_memkit.plugins.planning._given_run import GivenRun
from lightning_memkit.plugins.planning._planned_optimizer import eight_bit_for
from lightning_memkit.plugins.planning._planned_predictions import BatchParts, Predictions
from lightning_memkit.plugins.planning.planning import _columns
from lightning_memkit.prediction.devices import Device

_LEAST = 0.005  # fraction of the peak; smaller savings are not listed
_NO_TIME = 0.005  # fraction of a step's time; less counts as none
_DEFAULT_PRECISION = "32-true"  # Lightning's default, not the user's choice
_NAMES = {
    "precision": "{}",
    "ranks": "{}",
    "offload": "{}",
    "gradients": "{}",
    "states": "{} of the optimizer",
    "checkpointing": "activation checkpointing, {}",
    "loss": "{} loss",
}


@dataclass(frozen=True, kw_only=True)
class RunsBatch:
    """A batch of the run.

    Attributes:
        content: the batch, on the host.
        rows: its number of rows.
        size: the rows of a micro-batch.
        budget: the budget of MemoryBudget; None without one.
        device: the training device; None for the CPU.
    """

    content: Any
    rows: int
    size: int
    budget: int | float | str | None
    device: Device | None


class RunAsProblem:
    """The run as the planner's problem, at its current micro-batch."""

    def __init__(self, given: GivenRun, batch: RunsBatch) -> None:
        self._accumulated, self._budget = given.accumulated, batch.budget
        arguments = {**given.arguments, "accumulate_grad_batches": given.accumulated}
        if arguments.get("precision") == _DEFAULT_PRECISION:
            del arguments["precision"]
        self._rows, self._size = rows, size = batch.rows, batch.size
        device = batch.device
        parts = BatchParts(batch.content, rows, on_cpu=device is None)
        self._predictions = Predictions(given.module, parts, arguments, device or "cpu")
        columns, _ = _columns(arguments, device, 1, None)
        self._columns = {
            name: list(columns.get(name, (Choice(column=name, name=""),))) for name in choices.COLUMNS
        }
        self._problem = Problem(
            predict=self._predictions,
            floor=lambda family: 0,
            rows=rows,
            sizes=(size,),
            usable_bytes=1 << 62,
            beside_bytes=0 if device is None else device.context_bytes,
            times=TimesHere() if device is None else TimesByRates(device),
            goal="speed",
            host_bytes_per_second=1.0 if device is None else device.host_bytes_per_second,
        )

    @property
    def family(self) -> Family:
        """The run's own configuration: in each column what the user gave, else the default."""
        return Family(tuple(found[0] for found in self._columns.values()))

    def row(self, family: Family | None = None, size: int | None = None) -> Row:
        """The prediction of the run with a change.

        Raises:
            UnavailableError: the choice does not apply to the module.
        """
        return self._problem.row(family or self.family, size or self._size)

    def changes(self) -> Iterator[tuple[str, str, Family, int]]:
        """Each single change: its description, what to write, the family and the micro-batch size."""
        for column, known in self._alternatives():
            for choice in known:
                own = Family(tuple(choice if one.column == column else one for one in self.family.choices))
                if refusal(own) or (choice.name == choices.RELEASED and not self._may_release):
                    continue
                yield _NAMES[column].format(choice.name), _how(choice), own, self._size
        if self._size > 1:
            half = (self._size + 1) // 2
            memory = "auto" if self._budget is None else self._budget
            how = f"MemoryBudget({memory!r}, micro_batch_size={half})"
            yield f"micro-batch {half} instead of {self._size}", how, self.family, half

    def _alternatives(self) -> Iterator[tuple[str, list[Choice]]]:
        for column, known in self._columns.items():
            if column != "states":
                yield column, known[1:]
        ask = partial(self._predictions.ask, rows=self._size)
        try:
            yield "states", list(choices.optimizer_states(eight_bit_for(ask)))[1:]
        except UnavailableError:
            return

    @property
    def _may_release(self) -> bool:
        """Released gradients can't be accumulated, nor restored for a retry after an OOM."""
        return self._size == self._rows and self._accumulated == 1 and self._budget is None


def predicted_step(run: RunAsProblem) -> PredictedStep:
    """The prediction of the run's own step.

    Raises:
        Exception: whatever the step raises on fake tensors.
    """
    row = run.row()
    if row.failed is not None:
        raise row.failed
    assert row.prediction is not None
    anatomy = row.prediction.anatomy
    return PredictedStep(
        peak_bytes=anatomy.peak_bytes, at_peak=dict(anatomy.at_peak), largest=dict(anatomy.largest)
    )


def advice(run: RunAsProblem) -> tuple[Advice, ...]:
    """Single changes that save memory, best ratio of saved bytes to time first.

    Raises:
        Exception: whatever the step raises on fake tensors.
    """
    base = run.row()
    if base.failed is not None:
        raise base.failed
    found = []
    for change, how, family, own_size in run.changes():
        try:
            row = run.row(family, own_size)
        except UnavailableError:
            continue
        saved = base.taken_bytes - row.taken_bytes
        if row.failed is not None or saved < _LEAST * base.taken_bytes:
            continue
        share = row.seconds / base.seconds - 1 if base.seconds else 0.0
        found.append(
            Advice(change=change, saved_bytes=saved, time_share=share, changes=row.family.changes, how=how)
        )
    return tuple(sorted(found, key=_worth, reverse=True))


def _worth(one: Advice) -> tuple[float, int]:
    """Sort key: saved bytes for the time that the change takes; changes that take none come first."""
    if one.time_share <= _NO_TIME:
        return float("inf"), one.saved_bytes
    return one.saved_bytes / one.time_share, one.saved_bytes


def _how(choice: Choice) -> str:
    """The code to write for a choice."""
    written = [_written(part) for part in (*choice.plugins, *choice.callbacks)]
    written += [f"{name}={value!r}" for name, value in choice.arguments.items()]
    if choice.optimizer is not None:
        written.append(choice.optimizer.line)
    return ", ".join(written)


def _written(part: PluginSpec) -> str:
    options = ", ".join(f"{name}={value!r}" for name, value in part.options.items())
    return f"{part.name}({options})"
